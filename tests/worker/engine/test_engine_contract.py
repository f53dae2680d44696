"""The contract of `GenerationEnginePort`, for the real engine (over a tiny model) and the scripted one."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.worker.engine.layouts import Layout, Numbers, changed, prefix_of, random_ids, run, work
from tests.worker.engine.reading import STAGES, read_along

from stoker_shared import build_request
from stoker_worker.engine.scripted import ScriptedEngine, ScriptedTokenizer
from stoker_worker.ports import GenerationWork


class Real:
    """`BlockPoolBatchEngine` over a tiny Llama. No token ends an answer, unless a test asks for one."""

    def __init__(self):
        self.layout = Layout("llama", eos=False)

    @property
    def tokenizer(self):
        return self.layout.loaded.tokenizer

    def engine(self, max_batch=4):
        return self.layout.engine(max_batch=max_batch)

    def work(self, number, max_tokens=8, **fields):
        return work(random_ids(random.Random(number), 40 + 7 * number), max_tokens, **fields)

    def ending(self):
        """An implementation of the same kind, and work whose answer ends by itself there."""
        one = self.work(0)
        (done,) = run(self.engine(), [one])
        ending = Real()
        tokenizer: Any = Numbers(frozenset({done.generated_ids[2]}))
        ending.layout.loaded = replace(ending.layout.loaded, tokenizer=tokenizer)
        return ending, one


class Scripted:
    """`ScriptedEngine`. Its answers to these prompts never end by themselves, unless a test asks for one."""

    tokenizer = ScriptedTokenizer()

    def engine(self, max_batch=4):
        return ScriptedEngine(max_batch=max_batch, steps_per_s=1e9)

    def work(self, number, max_tokens=8, prompt=None, is_saved=True, **fields):
        text = prompt or f"question {number} " * (number + 1)
        request = build_request({"agent_id": "a", "prompt": text, "max_tokens": max_tokens, **fields})
        return GenerationWork(request, tuple(text.encode()), None, is_saved)

    def ending(self):
        return self, self.work(0, prompt="say hi")


@pytest.fixture(scope="module", params=[pytest.param(Real, marks=pytest.mark.mlx), Scripted])
def side(request):
    return request.param()


def test_each_sequence_ends_once_and_is_counted_until_it_does(side):
    engine = side.engine(max_batch=2)
    uids = [engine.submit(side.work(n, max_tokens=3 + n)) for n in range(5)]
    ended = []
    while engine.in_flight:
        assert engine.progress().keys() == set(uids) - set(ended)
        assert engine.in_flight == len(uids) - len(ended)
        ended += [completion.uid for completion in engine.step()]
    assert Counter(ended) == Counter(uids)
    assert engine.step() == []
    assert engine.progress() == {}
    engine.close()


def test_only_a_batch_of_sequences_runs_and_the_others_wait_in_order(side):
    engine = side.engine(max_batch=2)
    uids = [engine.submit(side.work(n)) for n in range(5)]
    first_to_run = []
    while engine.in_flight:
        engine.step()
        running = [uid for uid, progress in engine.progress().items() if progress.stage != "waiting"]
        assert len(running) <= 2
        first_to_run += [uid for uid in sorted(running) if uid not in first_to_run]
    assert first_to_run == uids
    engine.close()


def test_an_answer_is_the_same_alone_and_in_a_batch(side):
    works = [side.work(n) for n in range(4)]
    alone = [run(side.engine(), [one])[0] for one in works]
    assert [done.generated_ids for done in run(side.engine(), works)] == [done.generated_ids for done in alone]
    assert len({done.generated_ids for done in alone}) == 4


def test_an_answer_ends_at_max_tokens_and_is_kept_whole(side):
    (done,) = run(side.engine(), [side.work(0, max_tokens=7)])
    assert (done.outcome, done.ended_by, len(done.generated_ids), done.kept) == ("finished", "length", 7, 7)
    assert (done.text, done.carry_text) == (side.tokenizer.decode(done.generated_ids), "")
    assert (done.error, done.logprobs) == (None, None)


def test_an_end_of_sequence_token_is_kept_but_not_in_the_text(side):
    ending, one = side.ending()
    (done,) = run(ending.engine(), [one])
    assert (done.ended_by, done.kept) == ("eos", len(done.generated_ids))
    assert done.generated_ids[-1] in ending.tokenizer.eos_ids
    assert done.text == ending.tokenizer.decode(done.generated_ids[:-1])
    assert done.cache.n_tokens == len(one.prompt_ids) + len(done.generated_ids)


def test_a_stop_string_and_everything_after_it_are_cut_from_text_and_cache(side):
    (plain,) = run(side.engine(), [side.work(1)])
    stop = plain.text[5:8]
    (done,) = run(side.engine(), [side.work(1, stop=[stop])])
    assert (done.outcome, done.ended_by, done.stop_string) == ("finished", "stop", stop)
    assert done.text == plain.text[: plain.text.index(stop)]
    assert side.tokenizer.decode(done.generated_ids[: done.kept]) + done.carry_text == done.text
    assert done.cache.n_tokens == len(side.work(1).prompt_ids) + done.kept


def test_a_stop_token_ends_the_answer_and_is_neither_in_text_nor_in_the_transcript(side):
    (plain,) = run(side.engine(), [side.work(1)])
    stop = plain.generated_ids[5]
    n = plain.generated_ids.index(stop)
    (done,) = run(side.engine(), [side.work(1, stop_token_ids=[stop], stop=["never said"])])
    assert (done.outcome, done.ended_by, done.stop_string) == ("finished", "stop", None)
    assert (done.generated_ids, done.kept, done.carry_text) == (plain.generated_ids[: n + 1], n, "")
    assert done.text == side.tokenizer.decode(done.generated_ids[:n])
    assert done.cache.n_tokens == len(side.work(1).prompt_ids) + n


def test_an_ignored_end_of_sequence_is_part_of_the_text_and_may_be_a_stop_token(side):
    ending, one = side.ending()
    (done,) = run(ending.engine(), [changed(one, ignore_eos=True, max_tokens=20)])
    assert (done.ended_by, done.kept, len(done.generated_ids)) == ("length", 20, 20)
    assert done.text == ending.tokenizer.decode(done.generated_ids)
    (end,) = ending.tokenizer.eos_ids & {*done.generated_ids}
    (stopped,) = run(ending.engine(), [changed(one, ignore_eos=True, max_tokens=20, stop_token_ids=(end,))])
    n = done.generated_ids.index(end)
    assert (stopped.generated_ids, stopped.ended_by, stopped.kept) == (done.generated_ids[: n + 1], "stop", n)


def test_nothing_ends_an_answer_before_min_tokens(side):
    ending, one = side.ending()
    (ended,) = run(ending.engine(), [one])
    (done,) = run(ending.engine(), [changed(one, min_tokens=6)])
    assert len(ended.generated_ids) <= 3
    assert len(done.generated_ids) > 6 or done.ended_by == "length"
    (plain,) = run(side.engine(), [side.work(1)])
    stop = side.tokenizer.decode(plain.generated_ids[:1])
    (text_stopped,) = run(side.engine(), [side.work(1, stop=[stop], min_tokens=4)])
    assert text_stopped.generated_ids[:5] == plain.generated_ids[:5]
    (token_stopped,) = run(side.engine(), [side.work(1, stop_token_ids=plain.generated_ids[:1], min_tokens=8)])
    assert (len(token_stopped.generated_ids), token_stopped.ended_by) == (8, "length")


def test_the_cache_is_returned_as_a_whole_or_not_at_all(side):
    one = side.work(9)
    whole, none = run(side.engine(), [one, side.work(9, is_saved=False)])
    assert whole.cache.n_tokens == len(one.prompt_ids) + 8
    assert all(array.shape[1] == whole.cache.n_tokens for pair in whole.cache.layers for array in pair)
    assert none.cache is None


def test_a_restored_prefix_gives_the_uncached_answer_and_is_counted(side):
    one = side.work(2)
    (done,) = run(side.engine(), [one])
    turn = replace(one, prompt_ids=(*one.prompt_ids, *done.generated_ids, 1, 2, 3))
    for n_cached in (done.cache.n_tokens, len(one.prompt_ids), 5):
        restored = replace(turn, prefix=prefix_of(done.cache, n_cached))
        cached, uncached = (run(side.engine(), [a_turn])[0] for a_turn in (restored, turn))
        assert cached.generated_ids == uncached.generated_ids
        assert (cached.cached_tokens, uncached.cached_tokens) == (n_cached, 0)


def test_a_sequence_can_be_cancelled_at_any_stage_and_changes_no_other_answer(side):
    plain = run(side.engine(), [side.work(0, max_tokens=30)])[0]
    engine = side.engine(max_batch=2)
    kept, running, waiting = (engine.submit(side.work(n, max_tokens=30)) for n in range(3))
    while engine.progress()[running].tokens < 3:
        engine.step()
    assert engine.cancel(waiting).generated_ids == ()
    cancelled = engine.cancel(running)
    assert (cancelled.outcome, cancelled.ended_by, cancelled.cache) == ("cancelled", None, None)
    assert cancelled.text == side.tokenizer.decode(cancelled.generated_ids)
    assert engine.cancel(running) is None
    assert engine.text(running) == ""
    done = []
    while engine.in_flight:
        done += engine.step()
    assert [completion.uid for completion in done] == [kept]
    assert done[0].generated_ids == plain.generated_ids
    engine.close()


def test_every_answer_can_be_read_while_it_grows(side):
    works = [side.work(n, max_tokens=20) for n in range(3)]
    done, read, stages = read_along(side.engine(max_batch=2), works)
    assert all(len(set(texts)) > 10 for texts in read)
    assert {stage for seen in stages for stage in seen} <= set(STAGES)
    assert stages[2][0] == "waiting"
    assert all(completion.timing.decode_s >= 0 for completion in done)


def test_a_scored_prompt_needs_no_answer_and_one_with_an_answer_has_both(side):
    fields = {"prompt_logprobs": 2, "cache": "off"}
    works = [
        side.work(0, max_tokens=0, **fields),
        side.work(1, max_tokens=3, prompt_logprobs_start=5, **fields),
        side.work(1, max_tokens=3),
    ]
    alone, both, plain = run(side.engine(), works)
    assert (alone.ended_by, alone.text, alone.generated_ids) == ("length", "", ())
    assert alone.prompt_logprobs.content[0] is None
    assert both.generated_ids == plain.generated_ids
    assert plain.prompt_logprobs is None
    for one, done, start in ((works[0], alone, 0), (works[1], both, 5)):
        scores = [entry for entry in done.prompt_logprobs.content if entry is not None]
        assert done.prompt_logprobs.start == start
        assert [entry.token for entry in scores] == [
            side.tokenizer.decode([token]) for token in one.prompt_ids[max(1, start) :]
        ]
        assert all(entry.logprob < 0 and len(entry.top_logprobs) == 2 for entry in scores)
