"""Rows with a guide have only the tokens that it allows, the rows beside them are as they are alone."""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from tests.worker.engine.layouts import EOS, Layout, random_ids, run, work
from tests.zoo.configs import VOCABULARY

from stoker_shared.errors import EngineFailed, GuideRefused
from stoker_worker.ports.model import Batching

pytestmark = pytest.mark.mlx

MODES = [("llama", Batching.ROWS), ("llama", Batching.BATCHED), ("llama", Batching.ONE_AT_A_TIME)]


class Chain:
    """Allows a few tokens after each, which depend on all tokens before; then nothing but the end."""

    def __init__(self, seed, length=20, fails_at=None, raises=False):
        self.seed, self.length, self.fails_at, self.raises = seed, length, fails_at, raises
        self.error, self.tokens = None, []

    def start(self, generated):
        self.tokens = list(generated)

    def after(self, token):
        if token is not None:
            self.tokens.append(token)
        if self.fails_at == len(self.tokens):
            if self.raises:
                raise RuntimeError("broken")
            self.error = GuideRefused("at its end")
            return None
        mask = np.zeros(4, np.uint32)  # more words than the model has logits for
        for allowed in self.allowed(self.tokens):
            mask[allowed // 32] |= np.uint32(1 << allowed % 32)
        return mask

    def allowed(self, tokens):
        if len(tokens) >= self.length:
            return {EOS}
        return set(random.Random(f"{self.seed} {list(tokens)}").sample(range(VOCABULARY - 1), 3)) | {120}

    def fork(self):
        return Chain(self.seed, self.length)


def guided_work(rng, seed, guide=None, max_tokens=40, **fields):
    one = work(random_ids(rng, rng.randint(1, 60)), max_tokens, seed=seed, **fields)
    return replace(one, guide=guide or Chain(seed))


def follows(guide, ids):
    return all(token in guide.allowed(ids[:n]) for n, token in enumerate(ids))


@pytest.fixture(scope="module")
def layouts():
    return {name: Layout(name) for name in ("llama", "gemma3_text")}


@pytest.mark.parametrize(("name", "batching"), [*MODES, ("gemma3_text", Batching.ROWS)])
def test_guided_rows_obey_and_plain_rows_answer_as_alone(layouts, name, batching):
    layout, rng = layouts[name], random.Random(1)
    ways = [{}, {"temperature": 1.5}, {"temperature": 0.7, "top_p": 0.9, "logprobs": True, "top_logprobs": 8}]
    guided = [guided_work(rng, n, repetition_penalty=1.1 + n / 10, **way) for n, way in enumerate(ways)]
    plain = [work(random_ids(rng, 30), 30), work(random_ids(rng, 9), 30, temperature=0.8, seed=5)]
    alone = [run(layout.engine(batching=batching), [one])[0] for one in plain]
    works = [*guided, *plain]
    for max_batch in (1, 8):
        done = run(layout.engine(batching=batching, max_batch=max_batch), works)
        for one, end in zip(guided, done, strict=False):
            assert end.ended_by == "eos"
            assert len(end.generated_ids) == 21
            assert follows(one.guide, end.generated_ids)
        for logprob in done[2].logprobs.content:
            assert all(np.isfinite(top.logprob) for top in logprob.top_logprobs)
            assert logprob.logprob <= logprob.top_logprobs[0].logprob <= 1e-6
        for one, end in zip(alone, done[3:], strict=True):
            assert end.generated_ids == one.generated_ids


@pytest.mark.parametrize(("name", "batching"), MODES)
def test_guided_rows_that_are_preempted_or_whose_step_breaks_go_on_exactly(layouts, name, batching, monkeypatch):
    layout, rng = layouts[name], random.Random(2)
    works = [guided_work(rng, n, temperature=0.8 * (n % 2)) for n in range(4)]
    plain = [run(layout.engine(batching=batching), [one])[0].generated_ids for one in works]
    engine, steps = layout.engine(batching=batching, max_batch=3), count(2)
    real = engine._generator.next

    def trouble():
        if next(steps) in (15, 40):
            monkeypatch.setattr(engine._generator, "next", _breaks_after(engine._generator.next))
        in_batch = list(engine._scheduler.in_batch())
        return engine._preempt(rng.choice(in_batch)) if in_batch and rng.random() < 0.2 else ()

    assert [end.generated_ids for end in run(engine, works, trouble)] == plain
    assert engine._generator.next != real


def _breaks_after(step):
    def broken(chunk_tokens):
        step(chunk_tokens)
        raise RuntimeError("out of memory")

    return broken


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("name", "batching"), MODES)
def test_a_guide_that_fails_fails_its_row_alone(layouts, name, batching, raises):
    layout, rng = layouts[name], random.Random(3)
    beside = [work(random_ids(rng, 30), 30), guided_work(rng, 1)]
    alone = [run(layout.engine(batching=batching), [one])[0].generated_ids for one in beside]
    for fails_at in (0, 1, 7):
        guide = Chain(9, fails_at=fails_at, raises=raises)
        failed, *done = run(layout.engine(batching=batching), [guided_work(rng, 9, guide), *beside])
        assert failed.outcome == "failed"
        assert isinstance(failed.error, GuideRefused)
        assert not isinstance(failed.error, EngineFailed)
        assert [end.generated_ids for end in done] == alone


@pytest.mark.parametrize(("name", "batching"), MODES)
def test_an_answer_that_is_whole_does_not_fail_because_its_guide_cannot_go_on(layouts, name, batching):
    """Its last token is fed after a preemption, and its guide asked once more."""
    engine = layouts[name].engine(batching=batching)

    def preempt():
        sequences = [one for one in engine._scheduler.in_batch() if len(one.generated) == 4]
        return [end for one in sequences for end in engine._preempt(one)]

    (end,) = run(engine, [guided_work(random.Random(4), 9, Chain(9, fails_at=5), max_tokens=5)], preempt)
    assert (end.outcome, end.ended_by, len(end.generated_ids)) == ("finished", "length", 5)


def test_where_all_that_a_guide_allows_is_forbidden_elsewhere_its_tokens_come_all_the_same():
    """A vocabulary that is larger than the model's, and a token that a processor has made impossible."""
    import mlx.core as mx

    from stoker_worker.engine.sampling import guided

    logits = mx.array([[0.0, -np.inf, 1.0], [3.0, -np.inf, 1.0]])
    only: Any = Chain(0)
    only.allowed = lambda tokens: {1}
    found = guided(logits, [(0, only, None)])
    assert found[1].tolist() == [3.0, -np.inf, 1.0]
    assert int(mx.argmax(found[0] - mx.logsumexp(found[0]))) == 1
    beyond: Any = Chain(0)
    beyond.allowed = lambda tokens: {40}
    assert guided(logits, [(1, beyond, None)])[1].tolist() == [3.0, -np.inf, 1.0]
    assert isinstance(beyond.error, GuideRefused)


def test_a_guided_row_gets_no_drafts_and_those_beside_it_do():
    from tests.worker.engine.test_drafts import repeating

    layout, rng = repeating("llama", eos=False), random.Random(5)
    guide: Any = Chain(1)
    guide.allowed = lambda tokens: {10 + len(tokens) % 3}  # it repeats itself, so it would be drafted
    works = [work(random_ids(rng, 20), 60), guided_work(rng, 1, guide, 60), work(random_ids(rng, 20), 60)]
    plain = [end.generated_ids for end in run(layout.engine(), works)]
    engine = layout.engine(draft_ngram=True)
    drafts = engine._generator._decode.drafts
    assert [end.generated_ids for end in run(engine, works)] == plain
    assert drafts.n_accepted > 10
    assert follows(works[1].guide, plain[1])
