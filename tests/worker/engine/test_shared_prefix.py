"""A prompt's beginning that several sequences have is in memory once, and the answers do not change."""

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.worker.engine.layouts import Layout, assert_right, cache_bytes, finish, prefix_of, random_ids, run, work

from stoker_worker.ports.model import Batching

pytestmark = pytest.mark.mlx

SYSTEM = 640
N = 6


@pytest.fixture(scope="module")
def layout():
    return Layout("llama", eos=False)


def sharing(ids, max_tokens, prefix=None, **fields):
    return replace(work(ids, max_tokens, prefix, **fields), shares=("ours",))


def crowd(rng, max_tokens=12):
    system = random_ids(rng, SYSTEM)
    return [sharing([*system, *random_ids(rng, rng.randint(1, 40))], max_tokens) for _ in range(N)]


def watched(engine, works):
    """The ends in the order of `works`; the most bytes after a step, and the most sequences that decoded at once."""
    seen = []

    def look():
        seen.append((cache_bytes(engine), len(engine._scheduler.decoding)))
        assert_counted(engine)

    done = run(engine, works, look)
    assert engine._pool.used == cache_bytes(engine) == 0
    return done, *map(max, zip(*seen, strict=True))


def assert_counted(engine):
    assert cache_bytes(engine) <= engine._pool.used * engine._kv_cost.block_bytes


def own_bytes(layout, tokens_each):
    """Most bytes of a beginning and of as many tokens for each sequence, the room that arrays have included."""
    return (SYSTEM + N * (tokens_each + 220)) * layout.spec.bytes_per_token


def test_a_beginning_is_in_memory_once_and_counted_once(layout):
    works = crowd(random.Random(1))
    whole = layout.kv_cost().sequence_blocks(SYSTEM + 52)
    blocks = whole + 2 * N
    assert blocks < (N - 2) * whole  # without a shared beginning, fewer would run at once
    done, most_bytes, widest = watched(layout.engine(max_batch=N, blocks=blocks), works)
    assert_right(layout, works, done)
    assert widest == N
    assert most_bytes < own_bytes(layout, 52)


def test_restored_sequences_that_begin_alike_hold_the_beginning_once(layout):
    first = crowd(random.Random(2), max_tokens=3)
    caches = [end.cache for end in run(layout.engine(max_batch=N), first)]
    rng = random.Random(3)
    works = [
        sharing([*one.prompt_ids, *random_ids(rng, rng.randint(1, 20))], 12, prefix_of(cache, len(one.prompt_ids) - 1))
        for one, cache in zip(first, caches, strict=True)
    ]
    done, most_bytes, widest = watched(layout.engine(max_batch=N), works)
    assert_right(layout, works, done)
    assert [end.cached_tokens for end in done] == [len(one.prompt_ids) - 1 for one in first]
    assert widest == N
    assert most_bytes < own_bytes(layout, 75)


def test_a_long_memory_is_not_copied_for_a_short_beginning(layout):
    rng = random.Random(13)
    system = random_ids(rng, 300)
    first = [sharing([*system, *random_ids(rng, 700)], 3) for _ in range(2)]
    caches = [end.cache for end in run(layout.engine(), first)]
    works = [
        sharing([*one.prompt_ids, 5, 6], 12, prefix_of(cache, len(one.prompt_ids) - 1))
        for one, cache in zip(first, caches, strict=True)
    ]
    engine = layout.engine()
    uids = [engine.submit(one) for one in works]
    engine.step()
    assert [row.n_shared for row in engine._scheduler.in_batch()] == [0, 0]
    assert_right(layout, works, finish(engine, uids))


def test_saved_caches_are_whole(layout):
    works = crowd(random.Random(5))
    ended = run(layout.engine(max_batch=N), works)
    alone = run(layout.engine(max_batch=N), [replace(one, shares=None) for one in works])
    for one, other in zip(ended, alone, strict=True):
        assert one.cache.n_tokens == other.cache.n_tokens
        for ours, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
            np.testing.assert_allclose(ours[0], theirs[0], atol=1e-4)
            np.testing.assert_allclose(ours[1], theirs[1], atol=1e-4)


@pytest.mark.parametrize("leave", ["cancel", "preempt"])
def test_the_others_keep_the_beginning_when_the_first_leaves(layout, leave):
    works = crowd(random.Random(6), max_tokens=30)
    engine = layout.engine(max_batch=N)
    uids = [engine.submit(one) for one in works]
    while len(engine._scheduler.decoding) < N:
        engine.step()
    first = next(sequence for sequence in engine._scheduler if sequence.uid == uids[0])
    assert list(engine._preempt(first) if leave == "preempt" else []) == []
    left = uids[1:] if leave == "cancel" and engine.cancel(uids[0]) else uids
    assert_right(layout, works[-len(left) :], finish(engine, left, lambda: assert_counted(engine)))


def test_preempted_sequences_take_no_copies_of_their_beginning(layout):
    import mlx.core as mx

    rng = random.Random(14)
    system = random_ids(rng, 2048)
    works = [sharing([*system, *random_ids(rng, 9)], 30) for _ in range(N)]
    engine = layout.engine(max_batch=N, prefill_tokens=512)
    uids = [engine.submit(one) for one in works]
    while len(engine._scheduler.decoding) < N:
        engine.step()
    bytes_before = mx.get_active_memory()
    for sequence in list(engine._scheduler.in_batch())[1:]:
        assert list(engine._preempt(sequence)) == []
    assert mx.get_active_memory() < bytes_before + 1024 * layout.spec.bytes_per_token
    assert_right(layout, works, finish(engine, uids))


def test_the_last_one_of_a_long_beginning_gives_it_back_when_it_needs_the_memory(layout):
    rng = random.Random(15)
    system = random_ids(rng, 2112)
    works = [sharing([*system, *random_ids(rng, 20)], 4) for _ in range(2)]
    works.append(sharing([*system[:300], *random_ids(rng, 20)], 1200))
    engine = layout.engine(blocks=13, prefill_tokens=512)
    uids, has_shared = [engine.submit(one) for one in works], []

    def look():
        has_shared.extend(one for one in engine._scheduler if one.uid == uids[2] and one.prefix)
        assert_counted(engine)

    assert_right(layout, works, finish(engine, uids, look))
    assert has_shared


def test_sequences_of_two_beginnings_that_begin_alike_for_longer_or_less_long_are_right(layout):
    rng = random.Random(7)
    systems = [random_ids(rng, 900), random_ids(rng, 320)]
    cuts = (900, 900, 700, 330, 640, 898, 320, 100)
    works = [sharing([*systems[0][:cut], *random_ids(rng, rng.randint(1, 70))], 15) for cut in cuts]
    works += [sharing([*systems[1], *random_ids(rng, n)], 15) for n in (30, 1)]
    done, most_bytes, widest = watched(layout.engine(max_batch=10, prefill_tokens=200), works)
    assert_right(layout, works, done)
    assert widest == 10
    assert most_bytes < sum(cuts) * layout.spec.bytes_per_token


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma", "olmo2", "minicpm3"])
def test_attention_of_other_kinds_shares_too(name):
    from tests.zoo.architectures import make_model

    layout = Layout(name, eos=False, model=make_model(name))
    assert layout.batching == Batching.ROWS
    rng = random.Random(8)
    system = [rng.randrange(90) for _ in range(300)]
    works = [sharing([*system, *(rng.randrange(90) for _ in range(n))], 6) for n in (3, 9, 30, 5)]
    engine, shared = layout.engine(), []
    done = run(engine, works, lambda: shared.extend(one for one in engine._scheduler if one.prefix))
    assert shared
    assert_right(layout, works, done)


@pytest.mark.parametrize("extra", ["mask", "sinks", "added"])
def test_attention_after_a_prefix_is_attention_to_all_tokens(extra):
    import mlx.core as mx

    from stoker_worker.engine.rows.attention import attention_after

    mx.random.seed(9)
    prefix, own = [(mx.random.normal((n, 2, t, 8)), mx.random.normal((n, 2, t, 4))) for n, t in ((1, 70), (3, 9))]
    queries = mx.random.normal((3, 6, 1, 8))
    keys, values = (
        mx.concatenate([mx.broadcast_to(a, (3, *a.shape[1:])), b], axis=2) for a, b in zip(prefix, own, strict=True)
    )
    mask = (mx.arange(9) >= mx.array([0, 4, 8])[:, None])[:, None, None] if extra == "mask" else None
    sinks = mx.random.normal((6,)) if extra == "sinks" else None
    added = mx.random.normal((3, 6, 1, 79)) if extra == "added" else None
    whole = added if mask is None else mx.concatenate([mx.ones((3, 1, 1, 70), mx.bool_), mask], axis=-1)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=whole, sinks=sinks)
    got = attention_after(queries, prefix, own, 0.3, mask=mask, added=added, sinks=sinks)
    assert mx.allclose(got, expected, atol=1e-5)
