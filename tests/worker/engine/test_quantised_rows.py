"""Keys and values in 8 bits: the answers of mlx-lm's own quantised cache, in half the memory, or a refusal by name."""

import random
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.worker.engine.layouts import Layout, cache_bytes, finish, random_ids, run, work
from tests.worker.engine.tiny_models import make_model

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.cli.main import run as run_command
from stoker_worker.engine.provider import MlxProvider
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.mlx

IDS = random_ids(random.Random(8), 900)


@pytest.fixture(scope="module")
def layout():
    return Layout("llama", eos=False, kv_bits=8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_a_cache_holds_bit_for_bit_what_mlx_lms_quantised_cache_holds(dtype, dim):
    import mlx.core as mx
    from mlx_lm.models.cache import QuantizedKVCache

    from stoker_worker.models.quantised_cache import QuantisedCache

    ours, theirs = QuantisedCache(), QuantizedKVCache(group_size=32 if dim % 64 else 64, bits=8)
    for n_tokens in (3, 1, 300):
        keys, values = (mx.random.normal((1, 2, n_tokens, dim)).astype(getattr(mx, dtype)) for _ in range(2))
        read = ours.update_and_fetch(keys, values)
        theirs.update_and_fetch(keys, values)
    assert ours.offset == theirs.offset == 304
    for which, expected in zip(("keys", "values"), theirs.keys_and_values(), strict=True):
        for plane, part in zip(ours.caches, expected, strict=True):
            assert mx.array_equal(getattr(plane, which)[..., :304, :], part)
    for array, (codes, scales, biases) in zip(read, theirs.keys_and_values(), strict=True):
        assert array.dtype == getattr(mx, dtype)
        assert mx.array_equal(array, mx.dequantize(codes, scales, biases, group_size=theirs.group_size, bits=8))


def test_rows_that_join_leave_and_are_preempted_answer_as_alone(layout):
    works = [work(IDS[i : i + n], 40) for i, n in enumerate((5, 130, 64, 600, 63, 9))]
    expected = [layout.alone(one.prompt_ids, 40) for one in works]
    engine = layout.engine(blocks=layout.kv_cost().sequence_blocks(700))

    def look():
        assert cache_bytes(engine) <= engine._pool.used * engine._kv_cost.block_bytes

    assert [list(done.generated_ids) for done in run(engine, works, look)] == expected
    assert engine.kv.preemptions


def test_prompts_that_begin_alike_share_the_quantised_beginning(layout):
    works = [replace(work([*IDS[:200], tail], 12), shares=(None,)) for tail in (1, 2, 3)]
    done = run(layout.engine(), works)
    assert [list(one.generated_ids) for one in done] == [layout.alone(one.prompt_ids, 12) for one in works]
    assert [one.cached_tokens for one in done] == [0, 200, 200]


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.29), ("float16", 0.54), ("bfloat16", 0.54)])
def test_a_sequence_takes_half_the_memory_of_16_bits(dtype, share):
    """So the same pool holds about twice the tokens."""
    sizes, tokens = {}, {}
    for kv_bits in (None, 8):
        layout = Layout("llama", eos=False, dtype=dtype, kv_bits=kv_bits, head_dim=128)
        engine = layout.engine()
        uid = engine.submit(work(IDS, 5))
        while not engine._scheduler.decoding:
            engine.step()
        sizes[kv_bits] = cache_bytes(engine)
        tokens[kv_bits] = layout.kv_cost().longest_sequence(2**24 // layout.kv_cost().block_bytes)
        (done,) = finish(engine, [uid])
        assert sum(array.nbytes for pair in done.cache.layers for array in pair) == 905 * layout.spec.bytes_per_token
    assert sizes[8] <= share * sizes[None]
    assert share * tokens[8] >= 0.98 * tokens[None]


# --- refusals ---


@pytest.mark.parametrize("store_dtype", ["q8", "q4"])
def test_a_cache_is_quantised_once_only(store_dtype):
    with pytest.raises(ValueError, match=r"kv_bits.*store_dtype"):
        read_settings({"kv_bits": "8", "store_dtype": store_dtype})
    said = CliRunner().invoke(run_command, ["--model", "x", "--kv-bits", "8", "--store-dtype", store_dtype])
    assert "Error: Value error, kv_bits" in said.output


@pytest.mark.parametrize(("name", "reason"), [("llama", "heads have 8 elements"), ("mamba2", "no full attention")])
def test_a_model_whose_caches_have_no_groups_is_refused(name, reason):
    from stoker_worker.models.cache_probe import read_cache_spec
    from stoker_worker.models.quantised_cache import quantise_caches

    model = make_model(name)
    with pytest.raises(ModelNotLoadable, match=f"--kv-bits 8.*{reason}"):
        quantise_caches(model, read_cache_spec(model))


@pytest.mark.parametrize("skip_proof", [False, True])
def test_a_model_that_does_not_run_in_rows_is_refused_with_the_reason(skip_proof, tmp_path, monkeypatch, layout):
    from stoker_worker.engine.rows import rows_generator
    from stoker_worker.models import loading

    monkeypatch.setattr(loading, "load_model", lambda *args, **options: (layout.model, layout.loaded))
    settings = read_settings({"store": tmp_path, "model": "x", "kv_bits": 8, "skip_proof": skip_proof, "max_batch": 2})
    engine, _ = MlxProvider(settings).load()
    engine.close()
    monkeypatch.setattr(rows_generator, "install", lambda model: False)
    settings = settings.model_copy(update={"store": tmp_path / "other"})
    with pytest.raises(ModelNotLoadable, match=r"--kv-bits 8 needs .* in rows: .* cannot be served in rows"):
        MlxProvider(settings).load()
