"""How many jobs run at once when the operator does not say: 32, and never more than memory holds."""

import json
from dataclasses import replace

import pytest
from tests.worker.engine.test_provider_contract import mlx_provider

from stoker_worker.engine.provider import default_max_batch
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.ports.model import MaxBatch

QWEN3_4B = ModelCacheSpec((LayerSpec(LayerKind.FULL, n_kv_heads=8, key_dim=128, value_dim=128),) * 36, "bfloat16")
TOKEN_BYTES = 147_456


def chosen(kv_bytes):
    return default_max_batch(QWEN3_4B, kv_bytes=kv_bytes, prefill_tokens=1024)


def test_a_full_tile_of_rows_runs_at_once_unless_there_is_no_room_for_one_long_sequence():
    assert chosen(1 << 40) == MaxBatch(32, "the default")
    unknown = ModelCacheSpec((LayerSpec(LayerKind.UNKNOWN),), "float32")  # its size sets no limit
    assert default_max_batch(unknown, kv_bytes=1 << 30, prefill_tokens=256).jobs == 32
    assert chosen(1 << 20).jobs == 1


@pytest.mark.parametrize("gigabytes", [2, 4])
def test_less_memory_holds_fewer_jobs(gigabytes):
    found = chosen(gigabytes << 30)
    assert found.jobs * 1024 * TOKEN_BYTES <= gigabytes << 30
    assert found.jobs >= (gigabytes << 30) // (1024 * TOKEN_BYTES) // 2
    assert found.why == f"KV memory for {found.jobs} sequences of 1024 tokens"


@pytest.mark.mlx
def test_engine_proof_and_producers_have_one_number(tmp_path):
    def load(**settings):
        provider = replace(first, settings=first.settings.model_copy(update={"max_batch": None, **settings}))
        engine, loaded = provider.load()
        assert engine._width.most == loaded.max_batch.jobs
        engine.close()
        return loaded.max_batch

    first = mlx_provider(tmp_path)
    memo = tmp_path / "store" / "model-proofs.json"
    assert load(kv_max_bytes=1 << 20).jobs == 1
    assert load(max_batch=1) == MaxBatch(1, "given")
    assert len(json.loads(memo.read_text())) == 1, "one number, one proof"
    assert load() == MaxBatch(32, "the default")
    assert len(json.loads(memo.read_text())) == 2
