"""Cache layouts that the first documents name, and MLA, which came later. Tiny and random.

Each model has a turn, the store is opened anew, and the next turn goes on from what was stored.
"""

import random

import pytest
from tests.worker.engine.layouts import Layout, random_ids, run, work
from tests.worker.memory.agents import Agent, make_transcript, make_turn, open_store, problems_of, reopen
from tests.zoo import architectures

from stoker_worker.models.cache_probe import read_cache_spec
from stoker_worker.ports import LoadedModel
from stoker_worker.ports.cache_spec import LayerKind
from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


def latent_layout():
    """A tiny random DeepSeek V3."""
    layout = Layout("llama", eos=False)
    layout.model = architectures.make_model("deepseek_v3")
    layout.spec = read_cache_spec(layout.model)
    return layout


def check_a_turn_goes_on_from_the_store(layout, folder):
    layout.loaded = LoadedModel("m", "ab" * 32, "tok", 8192, layout.spec, layout.loaded.tokenizer)
    store, rng = open_store(folder), random.Random(1)
    ids = tuple(random_ids(rng, 600))
    for n_stored in (0, 612):
        agent = Agent(store, model=layout.loaded)
        base = agent.open()
        restored = store.restore(ids, agent=base, model=layout.loaded, salt=None)
        assert (restored.prefix.n_tokens if restored.prefix else 0) == n_stored
        assert restored.source == ("disk" if n_stored else "none")
        one = work(ids, 12, restored.prefix)
        (done,) = run(layout.engine(), [one])
        assert list(done.generated_ids) == layout.alone(ids, 12)
        assert len(set(done.generated_ids)) > 3, "an answer that depends on nothing shows nothing"
        ids = (*ids, *done.generated_ids)
        store.save(make_turn(agent, base, make_transcript(ids), done.cache))
        assert problems_of(store) == []
        store = reopen(store, folder)
        ids = (*ids, *random_ids(rng, 40))
    store.close()


def test_mock_moe_alternating_layers(tmp_path):
    """Sprint 2 plan, carried over from sprint 1: alternating layer types; the cache spec has the pattern."""
    dense_and_sparse = Layout("qwen3_moe").spec
    assert [layer.kind for layer in dense_and_sparse.layers] == 4 * [LayerKind.FULL]  # experts have no cache
    layout = Layout("gpt_oss", eos=False)
    kinds = [(layer.kind, layer.window_tokens) for layer in layout.spec.layers]
    assert kinds == 2 * [(LayerKind.WINDOW, 64), (LayerKind.FULL, 0)]
    assert layout.spec.bytes_per_token == 2 * 2 * (16 + 16) * 4  # of the two full layers only
    check_a_turn_goes_on_from_the_store(layout, tmp_path)


def test_mla_layers_are_stored(tmp_path):
    """No document asks for it: with MLA, a layer keeps a latent vector and a rotary part in place of K and V."""
    layout = latent_layout()
    assert {(layer.kind, layer.n_kv_heads, layer.key_dim, layer.value_dim) for layer in layout.spec.layers} == {
        (LayerKind.FULL, 1, 16, 8)
    }
    assert layout.batching == Batching.ROWS
    check_a_turn_goes_on_from_the_store(layout, tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_of_qwen2_0_5b_takes_12_kb(dtype):
    """KV-cache testing results: 0.11 MB for 9 tokens of Qwen2-0.5B, which is 12 KB for each."""
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    spec = Layout("qwen2", dtype=dtype, num_hidden_layers=24, hidden_size=896, **heads).spec
    assert spec.bytes_per_token == 12 * 1024
    assert round(9 * spec.bytes_per_token / 1e6, 2) == 0.11
