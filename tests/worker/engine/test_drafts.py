"""Drafts change the number of passes and nothing else: tokens, log-probabilities, caches and ends stay as they are."""

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.worker.engine.layouts import Layout, Numbers, breaks_at, cache_bytes, finish, random_ids, run, work

from stoker_shared.errors import EngineFailed
from stoker_worker.engine import sampling
from stoker_worker.engine.rows.row import MOST_ROWS

pytestmark = pytest.mark.mlx


def repeating(name, **changes):
    """A layout whose next token depends little on those before the last one, so that greedy answers go round."""
    from mlx.utils import tree_map_with_path

    layout = Layout(name, **changes)
    factors = {"o_proj": 0.02, "down_proj": 0.02, "lm_head": 10.0}

    def scaled(path, array):
        return next((factor for part, factor in factors.items() if part in path), 1.0) * array

    layout.model.update(tree_map_with_path(scaled, layout.model.parameters()))
    return layout


class Counted:
    """Runs an engine to its end.

    Attributes:
        done: completions, in the order of submission.
        steps: of the engine.
        drafts: the counters of the generator.
    """

    def __init__(self, engine, works):
        steps: list[None] = []
        self.drafts = engine._generator._decode.drafts
        self.done = run(engine, works, lambda: steps.append(None))
        self.steps = len(steps)
        assert engine._pool.used == 0


def assert_same(one, other):
    assert one.generated_ids == other.generated_ids
    assert (one.outcome, one.ended_by, one.text, one.kept) == (other.outcome, other.ended_by, other.text, other.kept)
    assert (one.cache is None) == (other.cache is None)
    for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
        for mine_array, their_array in zip(mine, theirs, strict=True):
            assert mine_array.shape == their_array.shape
            assert np.abs(mine_array - their_array).max() < 1e-4
    for mine, theirs in zip(*((x.logprobs.content if x.logprobs else []) for x in (one, other)), strict=True):
        assert mine.token == theirs.token
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_all_ways_of_sampling_give_the_same_answers_and_caches_in_fewer_steps(name):
    layout = repeating(name, eos=False)
    rng = random.Random(name)
    fields = [
        {},
        {"temperature": 0.3, "seed": 7},
        {"temperature": 0.3, "seed": 8, "top_k": 20, "top_p": 0.9, "logprobs": True, "top_logprobs": 2},
        {"repetition_penalty": 1.001, "logprobs": True},
        {"temperature": 0.1, "seed": 9, "repetition_penalty": 1.001},
    ]
    works = [work(random_ids(rng, rng.randint(1, 70)), 60, **more) for more in fields]
    for max_batch in (1, MOST_ROWS):
        plain = Counted(layout.engine(max_batch=max_batch), works)
        drafted = Counted(layout.engine(max_batch=max_batch, draft_ngram=True), works)
        for one, other in zip(drafted.done, plain.done, strict=True):
            assert_same(one, other)
        assert drafted.drafts.n_accepted > 40
        assert drafted.drafts.n_accepted < drafted.drafts.n_drafted  # some were wrong, and were taken back
        assert drafted.steps < plain.steps


def test_a_row_ends_where_it_ends_without_drafts_and_others_go_on():
    """At a stop string within a draft, at the end of sequence, and at `max_tokens`."""
    layout = repeating("qwen3", eos=False)
    rng = random.Random(3)
    works = [work(random_ids(rng, 20), 40 + 3 * n, temperature=0.3 * (n % 2), seed=n) for n in range(10)]
    for _ in range(4):
        ids = random_ids(rng, 20)
        said = layout.alone(ids, 60)
        works.append(work(ids, 60, stop=["".join(f"<{token}>" for token in said[22:45])]))
    said = [one.generated_ids for one in run(layout.engine(max_batch=3), works)]
    with_stop = {token for answer in said[10:] for token in answer}
    _, eos = max((answer.index(token), token) for answer in said for token in answer if token not in with_stop)
    layout.loaded = replace(layout.loaded, tokenizer=Numbers(frozenset({eos})))
    plain = Counted(layout.engine(max_batch=3), works)
    drafted = Counted(layout.engine(max_batch=3, draft_ngram=True), works)
    for one, other in zip(drafted.done, plain.done, strict=True):
        assert_same(one, other)
    assert {one.ended_by for one in plain.done} == {"stop", "eos", "length"}
    assert drafted.drafts.n_accepted > 40


def test_sequences_that_are_preempted_or_cancelled_while_they_have_drafts_leave_the_right_answers():
    layout = repeating("llama", eos=False)
    rng = random.Random(5)
    works = [work(random_ids(rng, 20), 60, temperature=0.2, seed=n) for n in range(6)]
    plain = Counted(layout.engine(), works).done
    engine = layout.engine(max_batch=3, draft_ngram=True)
    uids = [engine.submit(one) for one in works]

    def trouble():
        assert cache_bytes(engine) <= engine._pool.used * engine._kv_cost.block_bytes
        if rng.random() < 0.2 and (in_batch := list(engine._scheduler.in_batch())):
            yield from engine._preempt(rng.choice(in_batch))
        if uids[2] in engine.progress() and engine.progress()[uids[2]].tokens > 30:
            yield engine.cancel(uids[2])

    drafts = engine._generator._decode.drafts
    done = finish(engine, uids, trouble)
    assert drafts.n_accepted > 40
    for n, (end, other) in enumerate(zip(done, plain, strict=True)):
        n_said = len(end.generated_ids)
        assert end.generated_ids == other.generated_ids[:n_said]
        assert n_said == 60 or (n == 2 and n_said > 30)


def test_a_repeating_row_that_is_preempted_with_its_last_token_pending_ends_once():
    layout = repeating("llama", eos=False)
    one = work(random_ids(random.Random(5), 20), 60)
    (plain,) = run(layout.engine(), [one])
    engine, ended = layout.engine(draft_ngram=True), []
    engine.submit(one)
    while engine.in_flight:
        ended += engine.step()
        for sequence in list(engine._scheduler.in_batch()):
            if sequence.n_left == 1:
                assert not list(engine._preempt(sequence))
    engine.close()
    assert [end.outcome for end in ended] == ["finished"]
    assert_same(ended[0], plain)


def test_a_sampler_that_raises_fails_its_row_alone_among_drafted_ones(monkeypatch):
    layout = repeating("llama", eos=False)
    rng = random.Random(4)
    works = [work(random_ids(rng, 20), 60) for _ in range(3)]
    works.append(work(random_ids(rng, 20), 60, temperature=0.1, seed=5))
    plain = run(layout.engine(), works[:3])
    monkeypatch.setattr(sampling.Sampler, "__call__", breaks_at(sampling.Sampler.__call__, 40))
    *done, failed = run(layout.engine(draft_ngram=True), works)
    assert failed.outcome == "failed"
    assert isinstance(failed.error, EngineFailed)
    for one, other in zip(done, plain, strict=True):
        assert_same(one, other)


def test_a_batch_gets_no_drafts_while_it_is_wide():
    layout = repeating("llama", eos=False)
    engine = layout.engine(max_batch=4 * MOST_ROWS, draft_ngram=True)
    for n in range(MOST_ROWS + 5):
        engine.submit(work(random_ids(random.Random(n), 20), 40 + 4 * n))
    generator, seen = engine._generator, set()
    while engine.in_flight:
        is_wide, before = len(generator._decode) > MOST_ROWS, generator._decode.drafts.n_drafted
        engine.step()
        seen.add((is_wide, generator._decode.drafts.n_drafted > before))
    engine.close()
    assert (True, False) in seen
    assert (False, True) in seen
    assert (True, True) not in seen


def test_a_model_with_windows_gets_no_drafts():
    assert Counted(Layout("gemma3_text").engine(draft_ngram=True), [work([1, 2, 3] * 20, 9)]).drafts is None
