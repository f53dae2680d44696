"""Scored prompts: the log-probabilities of a plain forward pass, in every mode and layout, in any batch."""

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.worker.engine.layouts import Layout, finish, prefix_of, random_ids, run, work

from stoker_worker.ports.model import Batching

pytestmark = pytest.mark.mlx

FAMILIES = ["llama", "gemma3_text", "qwen3_next", "mamba2", "falcon_h1"]
"""Full attention; windows; recurrent layers beside full attention, alone, and in one layer with it."""

ROUNDING = 2e-3
"""A plain pass in parts differs from one in whole by up to 6e-4 in qwen3_next, depending on the kind of processor."""


@pytest.fixture(scope="module", params=FAMILIES)
def layout(request):
    return Layout(request.param, eos=False)


@pytest.fixture(scope="module")
def llama():
    return Layout("llama", eos=False)


def scored(ids, max_tokens=0, start=0, n_top=2, prefix=None, is_saved=False, shares=None):
    fields = {"prompt_logprobs": n_top, "prompt_logprobs_start": start, "cache": "off"}
    return replace(work(ids, max_tokens, prefix, is_saved, **fields), shares=shares)


def plain_logprobs(layout, ids):
    """Of each place of the prompt, those of all tokens: (tokens, vocabulary)."""
    import mlx.core as mx

    logits = layout.model(mx.array([list(ids)]))[0].astype(mx.float32)
    return np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def assert_right(layout, works, done):
    for one, end in zip(works, done, strict=True):
        request, ids = one.request, one.prompt_ids
        assert end.outcome == "finished"
        assert len(end.generated_ids) == request.max_tokens
        if request.max_tokens:
            assert list(end.generated_ids) == layout.alone(ids, request.max_tokens)
        if request.prompt_logprobs is None:
            assert end.prompt_logprobs is None
            continue
        found, expected = end.prompt_logprobs, plain_logprobs(layout, ids)
        assert found.start == request.prompt_logprobs_start
        assert len(found.content) == len(ids) - found.start
        for at, entry in enumerate(found.content, start=found.start):
            if at == 0:
                assert entry is None
                continue
            likely = np.argsort(-expected[at - 1])[: request.prompt_logprobs]
            assert entry.token == f"<{ids[at]}>"
            assert entry.logprob == pytest.approx(expected[at - 1][ids[at]], abs=ROUNDING)
            assert [top.token for top in entry.top_logprobs] == [f"<{token}>" for token in likely]
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(expected[at - 1][likely], abs=ROUNDING)


def modes(layout):
    return [mode for mode in Batching if mode != Batching.ROWS or layout.batching == Batching.ROWS]


def test_scores_are_those_of_a_plain_pass_in_every_mode_beside_any_other_sequence(layout):
    rng = random.Random(1)
    for mode in modes(layout):
        works = [
            scored(random_ids(rng, 150)),
            work(random_ids(rng, 90), 6),  # not scored
            scored(random_ids(rng, 70), max_tokens=5, n_top=0),
            scored(random_ids(rng, 40), start=25, n_top=1),
            scored(random_ids(rng, 1)),
            scored(random_ids(rng, 2), n_top=20),
        ]
        done = run(layout.engine(prefill_tokens=32, batching=mode), works)
        assert_right(layout, works, done)
        assert all(end.ended_by == "length" for end in done)
        assert all(end.text == "" for one, end in zip(works, done, strict=True) if one.request.max_tokens == 0)


def test_scores_after_a_restored_prefix_are_those_of_the_whole_prompt(layout):
    rng = random.Random(2)
    first = work(random_ids(rng, 120), 5)
    for mode in modes(layout):
        (done,) = run(layout.engine(batching=mode), [first])
        ids = (*first.prompt_ids, *done.generated_ids, *random_ids(rng, 50))
        works = [scored(ids, n, start=126, prefix=prefix_of(done.cache, 125)) for n in (0, 4)]
        ended = run(layout.engine(prefill_tokens=32, batching=mode), works)
        assert_right(layout, works, ended)
        assert [end.cached_tokens for end in ended] == [125, 125]


def test_a_prompt_takes_over_a_beginning_only_up_to_the_first_token_that_is_scored(llama):
    rng = random.Random(3)
    system = random_ids(rng, 330)
    works = [scored([*system, *random_ids(rng, 30)], n, start, shares=("ours",)) for n, start in ((0, 0), (3, 331))]
    works += [scored([*system, *random_ids(rng, 30)], 0, start, shares=("ours",)) for start in (100, 300, 331)]
    done = run(llama.engine(max_batch=5), works)
    assert_right(llama, works, done)
    assert [end.cached_tokens for end in done] == [0, 330, 99, 299, 330]


def test_prompts_that_begin_alike_do_not_wait_for_each_other_but_for_one(llama):
    rng = random.Random(10)
    context = random_ids(rng, 90)
    works = [scored([*context, *random_ids(rng, 4)], start=90, shares=("ours",)) for _ in range(20)]
    engine = llama.engine(max_batch=32, prefill_tokens=256)
    steps = []
    ended = run(engine, works, lambda: steps.append(1))
    assert_right(llama, works, ended)
    assert [end.cached_tokens for end in ended] == [0] + [89] * 19
    assert len(steps) < 10


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_broken_step_scores_the_prompts_anew(llama, step):
    rng = random.Random(4)
    works = [scored(random_ids(rng, 90), 3), scored(random_ids(rng, 70)), work(random_ids(rng, 50), 4)]
    engine = llama.engine(prefill_tokens=32)
    uids, done = [engine.submit(one) for one in works], {}
    for n in range(1, 200):
        if n == step:
            engine._generator._model = None  # the next pass raises
        done |= {end.uid: end for end in engine.step()}
    assert_right(llama, works, [done[uid] for uid in uids])


def test_a_preempted_prompt_is_scored_whole(llama):
    rng = random.Random(5)
    works = [scored(random_ids(rng, 200), 2), scored(random_ids(rng, 300)), scored(random_ids(rng, 260), start=40)]
    engine = llama.engine(prefill_tokens=32)

    def preempt():
        for sequence in list(engine._scheduler.prefilling.values())[1:]:
            list(engine._preempt(sequence))

    assert_right(llama, works, run(engine, works, preempt))


def test_a_scored_prompt_frees_its_memory_without_decoding_and_when_cancelled(llama):
    rng = random.Random(6)
    engine = llama.engine(prefill_tokens=32)
    engine.submit(scored(random_ids(rng, 33)))
    cancelled = engine.submit(scored(random_ids(rng, 400)))
    engine.step()
    assert engine.progress()[0].stage == "prefill"
    assert [end.outcome for end in engine.step()] == ["finished"]  # 32 tokens, and the last one is never decoded
    end = engine.cancel(cancelled)
    assert (end.outcome, end.prompt_logprobs) == ("cancelled", None)
    assert (engine._pool.used, engine.in_flight, engine._generator.nbytes) == (0, 0, 0)


def test_the_cache_of_a_scored_prompt_can_be_saved(llama):
    ids = random_ids(random.Random(7), 300)
    (end,) = run(llama.engine(), [scored(ids, start=270, is_saved=True)])
    (whole,) = run(llama.engine(), [work(ids, 1)])
    assert end.cache.n_tokens == 299
    for ours, theirs in zip(end.cache.layers, whole.cache.layers, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0][:, :299], atol=1e-4)


@pytest.mark.parametrize("mode", [Batching.ROWS, Batching.BATCHED, Batching.ONE_AT_A_TIME])
def test_a_prompt_that_cannot_be_scored_fails_alone(llama, mode, monkeypatch):
    rng = random.Random(8)
    bad = scored(random_ids(rng, 60), 3)
    works = [bad, scored(random_ids(rng, 60), 3), work(random_ids(rng, 60), 3)]
    engine = llama.engine(batching=mode)
    uids = [engine.submit(one) for one in works]
    scorer = next(iter(engine._scheduler)).scorer

    def broken(logits, tokens):
        raise ValueError("no scores")

    monkeypatch.setattr(scorer, "_add", broken)
    failed, *done = finish(engine, uids)
    assert failed.outcome == "failed"
    assert "no scores" in str(failed.error)
    assert_right(llama, works[1:], done)


def test_a_pass_that_scores_takes_few_tokens_of_all_sequences_together(llama, monkeypatch):
    seen = []

    def noted(scorer, logits, n_before):
        seen.append(logits.shape[0])

    monkeypatch.setattr("stoker_worker.engine.prompt_scores.PromptScorer.take", noted)
    rng = random.Random(9)
    engine = llama.engine(prefill_tokens=2048)
    for _ in range(3):
        engine.submit(scored(random_ids(rng, 1500), 2))
    for _ in range(3):
        engine.step()
    assert 0 < max(seen) <= 512 // 3
