"""Prompts that begin alike and arrive together: the beginning is prefilled once, and the answers do not change."""

import random
from dataclasses import replace

import pytest
from tests.worker.engine.layouts import Layout, assert_right, changed, finish, random_ids, run, work

from stoker_worker.engine.scheduler import cuts_for
from stoker_worker.engine.sequence import EndIds, Sequence

pytestmark = pytest.mark.mlx

SYSTEM = 300
OURS = ("ours",)
CUT_NOWHERE = ("gemma3_text", "qwen3_next", "mamba2")
"""A model with windows, one with recurrent layers too, and one that has nothing else."""


@pytest.fixture(scope="module")
def layout():
    return Layout("llama", eos=False)


def crowd(rng, n=8, shares=OURS):
    system = random_ids(rng, SYSTEM)
    return [replace(work([*system, *random_ids(rng, rng.randint(1, 40))], 7), shares=shares) for _ in range(n)]


def prefilled(done, works):
    return sum(len(one.prompt_ids) - end.cached_tokens for one, end in zip(works, done, strict=True))


@pytest.mark.parametrize("prefill_tokens", [64, 512])
def test_eight_prompts_with_one_beginning_prefill_it_once(layout, prefill_tokens):
    works = crowd(random.Random(1))
    done = run(layout.engine(max_batch=8, prefill_tokens=prefill_tokens), works)
    assert_right(layout, works, done)
    assert prefilled(done, works) < SYSTEM + 8 * 41
    assert all(end.cache.n_tokens >= len(one.prompt_ids) for one, end in zip(works, done, strict=True))


def test_equal_prompts_share_all_but_the_last_token(layout):
    works = crowd(random.Random(2), n=1) * 3
    done = run(layout.engine(), works)
    assert_right(layout, works, done)
    assert [end.cached_tokens for end in done][1:] == 2 * [len(works[0].prompt_ids) - 1]


def test_a_sequence_takes_the_beginning_of_one_that_decodes_already(layout):
    rng = random.Random(3)
    first, second = crowd(rng, n=2)
    engine = layout.engine()
    engine.submit(changed(first, max_tokens=60))
    while next(iter(engine.progress().values())).tokens < 20:
        engine.step()
    done = finish(engine, [engine.submit(second)])
    assert done[0].cached_tokens >= SYSTEM
    assert_right(layout, [second], done)


def test_a_templates_few_words_are_taken_from_a_sequence_that_has_them_but_not_waited_for(layout):
    rng = random.Random(8)
    words = random_ids(rng, 24)
    first, second, third = (replace(work([*words, *random_ids(rng, 40)], 60), shares=OURS) for _ in range(3))
    engine = layout.engine()
    uids = [engine.submit(first), engine.submit(second)]
    while next(iter(engine.progress().values())).tokens < 20:
        engine.step()
    done = finish(engine, [*uids, engine.submit(third)])
    assert [end.cached_tokens for end in done] == [0, 0, 24]
    assert_right(layout, [first, second, third], done)


@pytest.mark.parametrize("other", [None, ("theirs",)])
def test_nothing_is_shared_across_salts(layout, other):
    rng = random.Random(4)
    works = [replace(one, shares=shares) for one, shares in zip(crowd(rng, n=2), (OURS, other), strict=True)]
    done = run(layout.engine(), works)
    assert_right(layout, works, done)
    assert [end.cached_tokens for end in done] == [0, 0]


@pytest.mark.parametrize("name", ["llama", *CUT_NOWHERE])
def test_the_others_go_on_when_the_first_is_cancelled_in_its_prefill(name):
    layout, works = Layout(name, eos=False), crowd(random.Random(5), n=4)
    engine = layout.engine(prefill_tokens=32)
    uids = [engine.submit(one) for one in works]
    engine.step()
    engine.cancel(uids[0])
    done = finish(engine, uids[1:])
    assert_right(layout, works[1:], done)
    assert prefilled(done, works[1:]) < SYSTEM + 3 * 41


@pytest.mark.parametrize("name", CUT_NOWHERE)
def test_prompts_of_a_model_that_cannot_be_cut_prefill_one_beginning_once(name):
    layout, rng = Layout(name, eos=False), random.Random(6)
    works = crowd(rng)
    works[1:] = [replace(one, checkpoints_at=(256, SYSTEM)) for one in works[1:]]  # where they leave the first prompt
    works.append(replace(works[3], prompt_ids=(*works[3].prompt_ids[:100], *random_ids(rng, 250))))
    done = run(layout.engine(max_batch=4, prefill_tokens=64), works)
    assert_right(layout, works, done)
    assert prefilled(done[:8], works[:8]) < SYSTEM + 8 * 41
    assert all([one.n_tokens for one in end.cache.checkpoints] == [256, SYSTEM] for end in done[1:8])
    assert done[8].cached_tokens == 0  # the first one has no state that early


def test_a_prefill_stops_for_no_prompt_that_begins_otherwise():
    rng = random.Random(7)
    first, second, *others = [
        Sequence(uid, replace(one, checkpoints_at=(SYSTEM,)), None, None, EndIds())  # type: ignore[arg-type]
        for uid, one in enumerate([*crowd(rng, n=2), *(crowd(rng, n=1)[0] for _ in range(9))])
    ]
    for at, other in enumerate(others):
        other.work = replace(other.work, checkpoints_at=(SYSTEM - at - 1,))
    assert cuts_for([second, *others], first) == {SYSTEM}


def test_tokens_that_a_sequence_prefilled_itself_before_it_was_preempted_are_not_counted_as_cached(layout):
    first, second = (
        Sequence(uid, one, None, None, EndIds())  # type: ignore[arg-type]
        for uid, one in enumerate(crowd(random.Random(8), n=2))
    )
    first.caches, first.n_cached = [], 64  # as after a preemption
    first.take_beginning([], SYSTEM, second)
    assert first.completion("cancelled", layout.loaded.tokenizer).cached_tokens == SYSTEM - 64
