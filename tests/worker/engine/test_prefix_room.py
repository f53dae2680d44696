"""The memory that a prefix is restored into: the engine goes on in it, and copies nothing."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.worker.engine.layouts import Layout, finish, random_ids, run, work

from stoker_worker.ports import SequenceCache
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx]

IDS = random_ids(random.Random(5), 400)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float32 in 8 bits", "bfloat16 in 8 bits"])
def layout(request: pytest.FixtureRequest) -> Layout:
    dtype, _, in_8_bits = request.param.partition(" ")
    return Layout("llama", eos=False, dtype=dtype, kv_bits=8 if in_8_bits else None)


def restored(layout: Layout, layers: Any, n_tokens: int, n_prompt: int, max_tokens: int) -> SequenceCache:
    """What the loader thread hands over."""
    from stoker_worker.engine.transfer import MlxRoom

    def load() -> SequenceCache:
        room = MlxRoom(layout.spec, n_prompt, max_tokens)
        for ours, theirs in zip(layers, room.layers(), strict=True):
            for source, target in zip(ours, theirs, strict=True):
                target[:] = 77
                target[:, :n_tokens] = source[:, :n_tokens]
        return SequenceCache(n_tokens, (), room=room)

    with ThreadPoolExecutor(1) as loader:
        return loader.submit(load).result()


def addresses(layers: Any) -> list[int]:
    return [array.__array_interface__["data"][0] for pair in layers for array in pair]


@pytest.mark.parametrize("batching", [Batching.ROWS, Batching.BATCHED, Batching.ONE_AT_A_TIME])
def test_a_sequence_that_goes_on_in_restored_memory_answers_as_uncached(layout: Layout, batching: Batching) -> None:
    if layout.in_8_bits and batching == Batching.BATCHED:
        pytest.skip("in 8 bits a model runs in rows only")
    (first,) = run(layout.engine(), [work(IDS[:290], 10)])
    ids = [*IDS[:290], *first.generated_ids, *IDS[300:390]]
    prefixes = [restored(layout, first.cache.layers, n, len(ids), 12) for n in (300, 256, 1)]
    works = [work(ids, 12), *(work(ids, 12, prefix) for prefix in prefixes)]
    answers = [done.generated_ids for done in run(layout.engine(batching=batching), works)]
    assert answers == answers[:1] * 4


@pytest.mark.parametrize("batching", [Batching.ROWS, Batching.ONE_AT_A_TIME])
def test_a_sequence_decodes_and_ends_in_the_memory_that_it_was_restored_into(
    layout: Layout, batching: Batching
) -> None:
    """From the loader's arrays to those that are saved: the same memory, so no one has copied it."""
    (first,) = run(layout.engine(), [work(IDS[:300], 1)])
    prefix = restored(layout, first.cache.layers, 300, 390, 12)
    assert prefix.room is not None
    before = addresses(prefix.room.layers())
    (done,) = run(layout.engine(batching=batching), [work(IDS[:390], 12, prefix)])
    assert done.cache.n_tokens == 402
    assert addresses(done.cache.layers) == before
    for ours, theirs in zip(first.cache.layers, done.cache.layers, strict=True):
        assert all(a[:, :300].tobytes() == b[:, :300].tobytes() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("n_tokens", "n_pauses"), [(256, 1), (4096, 20)])
def test_other_threads_get_the_interpreter_while_memory_is_made(
    monkeypatch: pytest.MonkeyPatch, n_tokens: int, n_pauses: int
) -> None:
    """Not for each small array: the pauses took longer than all else of a short restore."""
    from stoker_worker.engine.transfer import MlxRoom

    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    layer = LayerSpec(LayerKind.FULL, n_kv_heads=2, key_dim=64, value_dim=64)
    MlxRoom(ModelCacheSpec((layer,) * 20, "float32"), n_tokens, 0)
    assert len(pauses) == n_pauses


def test_memory_that_is_in_use_elsewhere_fails_one_sequence_and_no_other(layout: Layout) -> None:
    (first,) = run(layout.engine(), [work(IDS[:300], 1)])
    engine = layout.engine()
    uid = engine.submit(work(IDS[:310], 4))
    engine.step()
    prefix = restored(layout, first.cache.layers, 300, 390, 12)
    assert prefix.room is not None
    view = prefix.room.layers()[0][0][1, 5:]
    with pytest.raises(ValueError, match="in use"):
        engine.submit(work(IDS[:390], 12, prefix))
    with pytest.raises(ValueError, match="shape"):
        engine.submit(work(IDS[:390], 12, SequenceCache(299, first.cache.layers)))
    del view
    uids = [uid, engine.submit(work(IDS[:390], 12, prefix))]
    with pytest.raises(ValueError, match="in use"):
        engine.submit(work(IDS[:390], 12, prefix))  # another sequence goes on in it
    assert [one.outcome for one in finish(engine, uids)] == ["finished"] * 2


def test_a_prefix_without_the_states_of_its_model_fails_one_sequence() -> None:
    hybrid = Layout("falcon_h1")
    (first,) = run(hybrid.engine(), [work(IDS[:30], 1)])
    with pytest.raises(ValueError, match="recurrent cache after 31 tokens"):
        hybrid.engine().submit(work(IDS[:40], 1, SequenceCache(31, first.cache.layers)))
