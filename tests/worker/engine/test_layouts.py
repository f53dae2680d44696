"""Every cache layout: batched and restored sequences give the answers of the same model alone and uncached."""

import random
from dataclasses import replace

import pytest
from tests.worker.engine.layouts import Layout, prefix_of, random_ids, run, work
from tests.worker.engine.tiny_models import CONFIGS

from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name not in ("qwen2", "qwen3")])  # as llama
def layout(request):
    return Layout(request.param)


def assert_has_the_layers_and_sizes_of(spec, cache):
    for snapshot in cache.snapshots:
        assert sum(x.nbytes for state in snapshot.states for x in state) == spec.snapshot_bytes(snapshot.n_tokens)
    assert len(cache.layers) == len(spec.full_layers)
    assert sum(x.nbytes for pair in cache.layers for x in pair) == cache.n_tokens * spec.bytes_per_token


@pytest.mark.parametrize("batching", Batching)
def test_turns_and_prompts_that_go_on_from_the_end_or_a_checkpoint_of_another_answer_as_uncached(layout, batching):
    if batching == Batching.ROWS != layout.batching:
        pytest.skip("without full attention there are no rows")
    rng = random.Random(7)
    places = (40, 256, 300)
    first = [replace(work(random_ids(rng, n), 4), checkpoints_at=places) for n in (310, 90, 257, 301)]
    second = []
    for number, done in enumerate(run(layout.engine(prefill_tokens=96, batching=batching), first)):
        ids = first[number].prompt_ids
        taken = [n for n in places if n < len(ids)]
        assert [one.n_tokens for one in done.cache.checkpoints] == taken
        own = [len(ids) - 1, len(ids) + len(done.generated_ids)] if layout.spec.snapshot_layers else []
        assert [one.n_tokens for one in done.cache.snapshots] == own
        assert_has_the_layers_and_sizes_of(layout.spec, done.cache)
        for n in taken:
            second.append(work((*ids[:n], *random_ids(rng, 30)), 6, prefix_of(done.cache, n)))
        ids = (*ids, *done.generated_ids)
        assert done.cache.n_tokens == len(ids)
        second.append(work((*ids, *random_ids(rng, rng.randint(1, 90))), 6, prefix_of(done.cache, len(ids))))
    second.append(work(random_ids(rng, 20), 6))  # a cold sequence among the restored ones
    for one, done in zip(second, run(layout.engine(prefill_tokens=32, batching=batching), second), strict=True):
        assert done.cached_tokens == (one.prefix.n_tokens if one.prefix else 0)
        assert list(done.generated_ids) == layout.alone(one.prompt_ids, 6)


def test_bfloat16_states_come_back_bit_for_bit():
    from stoker_worker.engine.transfer import prefix_to_caches, take_snapshot

    layout = Layout("falcon_h1", dtype="bfloat16")
    assert layout.spec.dtype == "bfloat16"
    (done,) = run(layout.engine(), [work(random_ids(random.Random(6), 70), 3)])
    at_end = done.cache.snapshots[-1]
    caches = prefix_to_caches(layout.model, prefix_of(done.cache, 73), layout.spec)
    again = take_snapshot(caches, 73, layout.spec)
    for old, new in zip(at_end.states, again.states, strict=True):
        assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(old, new, strict=True))
