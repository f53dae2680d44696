"""The engine when memory is short, a sequence is poisoned, a step breaks or a job is cancelled. Tiny models."""

import math
import random
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from tests.support.real_model import behind_the_likeliest
from tests.worker.engine.layouts import Layout, assert_right, breaks_at, finish, prefix_of, random_ids, run, work
from tests.worker.engine.reading import STAGES, read_along

from stoker_shared import build_request
from stoker_shared.errors import EngineFailed
from stoker_worker.engine import batch_engine, sampling
from stoker_worker.engine.transfer import cache_to_save
from stoker_worker.pipeline.prompt import fitted
from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

HYBRIDS = ("llama", "gemma3_text", "qwen3_next", "mamba2")


@pytest.fixture(scope="module")
def llama():
    return Layout("llama")


def works_of(rng, *shapes, **fields):
    return [work(random_ids(rng, n), max_tokens, **fields) for n, max_tokens in shapes]


# --- slots ---


def test_a_waiting_sequence_joins_in_the_step_that_frees_a_slot():
    layout = Layout("llama", eos=False)
    engine = layout.engine(max_batch=2)
    in_batch: list[set[int]] = []
    works = works_of(random.Random(9), (20, 6), (20, 30), (20, 8))
    done = run(engine, works, lambda: in_batch.append({one.uid for one in engine._scheduler.in_batch()}))
    assert max(map(len, in_batch)) == 2
    assert next(uids for uids in in_batch if 0 not in uids) == {1, 2}
    assert_right(layout, works, done)


# --- memory ---


@pytest.mark.parametrize("stop", [[], ["<1"]])
def test_texts_can_be_read_while_memory_is_short_and_after_a_failed_step(monkeypatch, stop):
    layout = Layout("llama", eos=False)
    works = works_of(random.Random(1), (200, 330), (180, 260), (30, 300), (230, 40), stop=stop)
    plain = run(layout.engine(), works)
    kv_cost = layout.kv_cost()
    engine = layout.engine(blocks=max(kv_cost.sequence_blocks(540), 2 * kv_cost.sequence_blocks(350)))
    monkeypatch.setattr(engine, "_advance", breaks_at(engine._advance, 20))
    done, read, stages = read_along(engine, works)
    assert [one.text for one in done] == [one.text for one in plain]
    assert {stage for seen in stages for stage in seen} == {*STAGES}
    if not stop:
        assert all(len(texts) > 30 for texts in read)
        assert all(done[n].text.startswith(max(read[n])) and len(max(read[n])) > 20 for n in range(4))


def test_a_large_sequence_neither_blocks_small_ones_nor_waits_forever(llama):
    rng = random.Random(3)
    blocks = llama.kv_cost().sequence_blocks(900)
    engine = llama.engine(blocks=blocks, max_batch=4)
    first = engine.submit(work(random_ids(rng, 20), 40))
    engine.step()
    large = engine.submit(work(random_ids(rng, 860), 5))
    ended, submitted = [], 0
    while large not in ended:
        if engine.in_flight < 4:
            engine.submit(work(random_ids(rng, 10), 3))
            submitted += 1
        ended += [completion.uid for completion in engine.step()]
        assert submitted < 200
    assert first in ended
    assert submitted > 10  # small ones overtook it
    engine.close()


def test_four_answers_of_32000_tokens_at_most_run_side_by_side_in_memory_for_1024(llama):
    rng = random.Random(7)
    works = works_of(rng, *((rng.randrange(4, 16), 32_000) for _ in range(4)), fit_max_tokens=True)
    works[:2] = (replace(one, request=one.request.model_copy(update={"ignore_eos": True})) for one in works[:2])
    engine = llama.engine(max_batch=4, blocks=6)
    loaded = replace(llama.loaded, kv_tokens=engine.longest_sequence)
    assert loaded.kv_tokens == 1024
    works = [replace(one, request=fitted(one.request, len(one.prompt_ids), loaded)) for one in works]
    side_by_side: list[int] = []
    done = run(engine, works, lambda: side_by_side.append(len(engine._scheduler.decoding)))
    assert max(side_by_side) == 4
    assert engine.kv.preemptions
    for end, one in zip(done, works, strict=True):
        assert behind_the_likeliest(llama.model, one.prompt_ids, end.generated_ids) < 1e-3
    n_tokens = [len(one.prompt_ids) + len(end.generated_ids) for end, one in zip(done, works, strict=True)]
    assert n_tokens[:2] == [1024, 1024]
    assert [end.ended_by for end in done] == ["length" if n == 1024 else "eos" for n in n_tokens]


@pytest.mark.parametrize("name", HYBRIDS)
def test_sequences_that_leave_before_a_token_of_them_is_prefilled_come_back(name, monkeypatch):
    """A step may prefill nothing, because the sequences that decode are owed time."""
    layout = Layout(name)
    works = works_of(random.Random(16), (30, 8), (45, 8))
    engine = layout.engine(batching=Batching.BATCHED)
    uids = [engine.submit(one) for one in works]
    with monkeypatch.context() as owed:
        owed.setattr(engine._budget, "chunk_tokens", lambda **_: 0)
        engine.step()
    in_batch = list(engine._scheduler.in_batch())
    assert [one.n_prefilled for one in in_batch] == [0, 0]
    for sequence in in_batch:
        assert list(engine._preempt(sequence)) == []
    assert_right(layout, works, finish(engine, uids))


# --- failures ---


@pytest.mark.parametrize("name", ["llama", "mamba2"])
@pytest.mark.parametrize("part", ["make_sampler", "make_processors"])
def test_a_poisoned_sequence_fails_alone_and_the_other_answers_are_unchanged(name, part, monkeypatch):
    layout = Layout(name)
    rng = random.Random(4)
    shapes = [(rng.randint(1, 80), 12) for _ in range(8)]
    works = works_of(rng, *shapes)
    poisoned = 3
    works[poisoned] = work(works[poisoned].prompt_ids, 12, temperature=1.0, seed=5, repetition_penalty=1.1)
    real = getattr(sampling, part)

    def poison(*args):
        made = real(*args)
        if not made:
            return made
        return breaks_at(made, 5) if callable(made) else [breaks_at(made[0], 5)]

    monkeypatch.setattr(sampling, part, poison)
    done = run(layout.engine(max_batch=8), works)
    failed = done.pop(poisoned)
    works.pop(poisoned)
    assert failed.outcome == "failed"
    assert isinstance(failed.error, EngineFailed)
    assert "unable to allocate" in str(failed.error)
    assert_right(layout, works, done)


class Fragile:
    """A model that raises when its input contains a poisonous token."""

    def __init__(self, model, is_poison):
        self._model, self._is_poison, self.breaks = model, is_poison, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, tokens, cache=None):
        if self._is_poison(tokens):
            self.breaks += 1
            raise RuntimeError("[malloc] unable to allocate")
        return self._model(tokens, cache=cache)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_sequence_that_breaks_every_step_is_found_and_failed_and_the_others_end_right(name):
    layout = Layout(name)
    rng = random.Random(5)
    works = works_of(rng, *[(rng.randint(2, 120), 15) for _ in range(6)], temperature=1.0, seed=3)
    plain = run(layout.engine(max_batch=6), works)
    poison = work([*random_ids(rng, 30), *[94] * 40], 9)

    def five_in_a_row(tokens):
        flat = tokens.flatten().tolist()
        return any(flat[n : n + 5] == [94] * 5 for n in range(len(flat)))

    layout.model = Fragile(layout.model, five_in_a_row)
    *done, failed = run(layout.engine(max_batch=7), [*works, poison])
    assert failed.outcome == "failed"
    assert "unable to allocate" in str(failed.error)
    assert layout.model.breaks >= 3
    assert [one.generated_ids for one in done] == [one.generated_ids for one in plain]


@pytest.mark.parametrize("beside", [0, 2])
@pytest.mark.parametrize("method", ["insert", "beginning"])
def test_a_sequence_whose_joining_breaks_once_is_not_lost(monkeypatch, method, beside):
    layout = Layout("llama", eos=False)
    rng = random.Random(12)
    beginning = random_ids(rng, 100)
    works = [replace(work([*beginning, *random_ids(rng, 20)], 15), shares=("ours",)) for _ in range(beside + 2)]
    plain = run(layout.engine(), works)
    engine = layout.engine()
    breaking = Mock(side_effect=breaks_at(getattr(engine._generator, method), 1 + beside * (method == "insert")))
    monkeypatch.setattr(engine._generator, method, breaking)
    done = run(engine, works)
    assert breaking.called
    assert [one.outcome for one in done] == ["finished"] * len(works)
    assert [one.generated_ids for one in done] == [one.generated_ids for one in plain]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_cache_that_is_saved_after_a_break_has_its_last_token(monkeypatch, name):
    layout = Layout(name, eos=False)
    works = works_of(random.Random(13), (40, 4), (25, 9))
    plain = run(layout.engine(), works)
    monkeypatch.setattr(batch_engine, "cache_to_save", breaks_at(cache_to_save, 1))
    for one, expected in zip(run(layout.engine(), works), plain, strict=True):
        assert (one.outcome, one.generated_ids) == ("finished", expected.generated_ids)
        of_both = zip(one.cache.layers, expected.cache.layers, strict=True)
        assert all(np.allclose(a, b, atol=1e-4) for mine, other in of_both for a, b in zip(mine, other, strict=True))
        last, expected_last = (
            [s for s in x.cache.snapshots if s.n_tokens == x.cache.n_tokens] for x in (one, expected)
        )
        for mine, other in zip(last, expected_last, strict=True):
            states = zip(mine.states, other.states, strict=True)
            assert all(np.allclose(a, b, atol=1e-4) for x, y in states for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_that_breaks_once_costs_no_sequence_a_token(name):
    layout = Layout(name)
    rng = random.Random(6)
    works = works_of(rng, *[(rng.randint(2, 120), 25) for _ in range(4)])
    fields = {"temperature": 0.9, "seed": 11, "frequency_penalty": 0.4, "logprobs": True, "stop": ["<3>"]}
    works += works_of(rng, (40, 25), **fields)
    plain = run(layout.engine(max_batch=5), works)
    passes = count(1)
    layout.model = Fragile(layout.model, lambda tokens: next(passes) in (10, 23))
    done = run(layout.engine(max_batch=5), works)
    assert layout.model.breaks == 2
    assert [(one.generated_ids, one.ended_by, one.kept) for one in done] == [
        (one.generated_ids, one.ended_by, one.kept) for one in plain
    ]
    assert len(done[-1].logprobs.content) == len(done[-1].generated_ids)
    assert [[s.n_tokens for s in one.cache.snapshots] for one in done] == [
        [s.n_tokens for s in one.cache.snapshots] for one in plain
    ]


def test_sequences_that_break_whenever_they_run_together_run_one_at_a_time_and_are_tried_together_ever_less_often():
    layout = Layout("llama", eos=False)
    works = works_of(random.Random(14), *[(9, 30)] * 40)
    plain = run(layout.engine(), works)
    layout.model = Fragile(layout.model, lambda tokens: tokens.shape[0] > 1)
    done = run(layout.engine(max_batch=8), works)
    assert [one.generated_ids for one in done] == [one.generated_ids for one in plain]
    assert layout.model.breaks <= 6


def test_a_sequence_restarted_after_a_failed_step_reports_no_cached_tokens():
    layout = Layout("llama")
    first = works_of(random.Random(15), (60, 5), (90, 5))
    again = [
        work((*one.prompt_ids, *done.generated_ids, 1, 2), 6, prefix_of(done.cache, len(one.prompt_ids)))
        for one, done in zip(first, run(layout.engine(), first), strict=True)
    ]
    assert [done.cached_tokens for done in run(layout.engine(), again)] == [60, 90]
    passes = count(1)
    layout.model = Fragile(layout.model, lambda tokens: next(passes) == 3)
    assert [done.cached_tokens for done in run(layout.engine(), again)] == [0, 0]
    assert layout.model.breaks == 1


# --- answers ---


def test_a_seed_gives_the_same_text_alone_in_a_batch_restored_and_preempted(llama):
    rng = random.Random(9)
    ids = random_ids(rng, 300)
    fields = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 7, "repetition_penalty": 1.2}
    (alone,) = run(llama.engine(), [work(ids, 24, **fields)])
    others = works_of(rng, (10, 9), (400, 12), temperature=1.0)
    assert run(llama.engine(), [*others, work(ids, 24, **fields)])[-1].generated_ids == alone.generated_ids
    (again,) = run(llama.engine(), [work(ids, 24, prefix_of(alone.cache, 280), **fields)])
    assert again.generated_ids == alone.generated_ids
    engine = llama.engine()

    def preempt():
        return [end for one in list(engine._scheduler.in_batch()) for end in engine._preempt(one)]

    assert run(engine, [work(ids, 24, **fields)], preempt)[0].generated_ids == alone.generated_ids
    (other,) = run(llama.engine(), [work(ids, 24, **{**fields, "seed": 8})])
    assert other.generated_ids != alone.generated_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-5},
        {"temperature": 5e-324},
        {"temperature": 1, "top_p": 1e-99},
        {"temperature": 5, "top_k": 1},
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_temperature_or_top_p_near_0_or_a_top_k_of_1_draws_the_likeliest_token(dtype, fields):
    logits = mx.random.normal((1, 1000), key=mx.random.key(1)).astype(getattr(mx, dtype))
    likeliest = int(mx.argmax(logits))
    logits[0, likeliest] += 1
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sampler: Any = sampling.make_sampler(build_request({"prompt": "x", **fields}), 1, 0)
    assert {sampler(logprobs).item() for _ in range(8)} == {likeliest}


def test_a_top_k_beyond_the_vocabulary_leaves_out_no_token():
    sampler: Any = sampling.make_sampler(build_request({"prompt": "x", "temperature": 1, "top_k": 10_000_000}), 1, 0)
    assert {sampler(mx.full((1, 3), -math.log(3))).item() for _ in range(40)} == {0, 1, 2}


def test_logprobs_match_the_models_own_and_list_the_likeliest_tokens(llama):
    from mlx_lm.generate import generate_step

    ids = random_ids(random.Random(12), 40)
    (done,) = run(llama.engine(), [work(ids, 8, logprobs=True, top_logprobs=3)])
    steps = generate_step(mx.array(ids), llama.model, max_tokens=8)
    for entry, (token, logprobs) in zip(done.logprobs.content, steps, strict=False):
        assert entry.token == f"<{token}>"
        assert bytes(entry.bytes) == entry.token.encode()
        assert entry.logprob == pytest.approx(logprobs[token].item(), abs=1e-4)
        likeliest = mx.sort(logprobs)[-3:].tolist()[::-1]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(likeliest, abs=1e-4)
        assert entry.top_logprobs[0].token == entry.token  # greedy
    assert len(done.logprobs.content) == len(done.generated_ids)
    (plain,) = run(llama.engine(), [work(ids, 8)])
    assert plain.logprobs is None
    assert plain.generated_ids == done.generated_ids


# --- layouts that cannot be batched ---


def test_a_cache_that_cannot_be_batched_runs_one_sequence_at_a_time():
    layout = Layout("llama4")
    assert not layout.spec.can_be_stored
    rng = random.Random(13)
    works = works_of(rng, (5, 6), (90, 6), (1, 1), (64, 9))
    works += works_of(rng, (30, 12), temperature=1.0, seed=2, logprobs=True, repetition_penalty=1.2)
    engine = layout.engine(max_batch=4)
    cancelled = engine.submit(work(random_ids(rng, 200), 5))
    engine.step()
    engine.cancel(cancelled)
    done = run(engine, works)
    for one, said in zip(works[:4], done, strict=False):
        assert list(said.generated_ids) == layout.alone(one.prompt_ids, one.request.max_tokens)
        assert said.cache is None
    assert len(done[4].logprobs.content) == len(done[4].generated_ids)
    assert run(layout.engine(), works[4:])[0].generated_ids == done[4].generated_ids
