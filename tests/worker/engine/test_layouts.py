"""Every cache layout: batched and restored sequences give the answers of the same model alone and uncached."""

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.worker.engine.layouts import Layout, Numbers, prefix_of, random_ids, run, work
from tests.worker.engine.tiny_models import CONFIGS

from stoker_worker.ports import LoadedModel
from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name not in ("qwen2", "qwen3")])  # as llama
def layout(request):
    return Layout(request.param)


def test_snapshots_have_the_layers_and_positions_of_the_spec(layout):
    rng = random.Random(4)
    (done,) = run(layout.engine(prefill_tokens=50), [work(random_ids(rng, 300), 6)])
    expected = [299, 306] if layout.spec.snapshot_layers else []
    assert [snapshot.n_tokens for snapshot in done.cache.snapshots] == expected
    for snapshot in done.cache.snapshots:
        n_bytes = sum(x.nbytes for state in snapshot.states for x in state)
        assert n_bytes == layout.spec.snapshot_bytes(snapshot.n_tokens)
    assert len(done.cache.layers) == len(layout.spec.full_layers)
    assert sum(x.nbytes for pair in done.cache.layers for x in pair) == 306 * layout.spec.bytes_per_token


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
        own = [len(ids) - 1, done.cache.n_tokens] if layout.spec.snapshot_layers else []
        assert [one.n_tokens for one in done.cache.snapshots] == own
        for n in taken:
            second.append(work((*ids[:n], *random_ids(rng, 30)), 6, prefix_of(done.cache, n)))
        ids = (*ids, *done.generated_ids)
        second.append(work((*ids, *random_ids(rng, rng.randint(1, 90))), 6, prefix_of(done.cache, len(ids))))
    second.append(work(random_ids(rng, 20), 6))  # a cold sequence among the restored ones
    for one, done in zip(second, run(layout.engine(prefill_tokens=32, batching=batching), second), strict=True):
        assert done.cached_tokens == (one.prefix.n_tokens if one.prefix else 0)
        assert list(done.generated_ids) == layout.alone(one.prompt_ids, 6)


def test_bfloat16_states_come_back_bit_for_bit():
    import mlx.core as mx

    from stoker_worker.engine.transfer import prefix_to_caches, take_snapshot
    from stoker_worker.models.cache_probe import read_cache_spec

    layout = Layout("falcon_h1")
    layout.model.set_dtype(mx.bfloat16)
    spec = read_cache_spec(layout.model)
    tokenizer: Any = Numbers()
    layout.loaded = LoadedModel("bf16", "f", "t", 8192, spec, tokenizer)
    assert spec.dtype == "bfloat16"
    (done,) = run(layout.engine(), [work(random_ids(random.Random(6), 70), 3)])
    at_end = done.cache.snapshots[-1]
    caches = prefix_to_caches(layout.model, prefix_of(done.cache, 73), spec)
    again = take_snapshot(caches, 73, spec)
    for old, new in zip(at_end.states, again.states, strict=True):
        assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(old, new, strict=True))
