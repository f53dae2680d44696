"""The first tokens of a batch come before the pass after them is dispatched: on a CPU that takes as long as a pass."""

import random

import mlx.core as mx
import pytest
from tests.worker.engine.layouts import Layout, random_ids, work

pytestmark = pytest.mark.mlx


class Watched:
    """An engine, and the passes that have been dispatched."""

    def __init__(self, layout, monkeypatch):
        self.engine = layout.engine()
        self.n_passes = 0
        real = mx.async_eval

        def async_eval(*arrays):
            self.n_passes += bool(arrays)
            real(*arrays)

        monkeypatch.setattr(mx, "async_eval", async_eval)

    def step(self):
        """The answers of the sequences that ended, by uid."""
        return {done.uid: list(done.generated_ids) for done in self.engine.step()}

    def tokens(self, uid):
        return self.engine.progress()[uid].tokens


def test_only_the_first_tokens_of_a_batch_wait_for_no_pass_but_their_own(monkeypatch):
    layout, rng = Layout("llama", eos=False), random.Random(3)
    watched, prompts = Watched(layout, monkeypatch), [random_ids(rng, n) for n in (1, 1, 30)]
    uids = [watched.engine.submit(work(ids, 9)) for ids in prompts[:2]]
    watched.step()
    assert (watched.n_passes, watched.tokens(uids[0])) == (1, 0)
    watched.step()
    assert (watched.n_passes, watched.tokens(uids[0]), watched.tokens(uids[1])) == (1, 1, 1)
    watched.step()
    assert (watched.n_passes, watched.tokens(uids[0])) == (3, 2)
    uids.append(watched.engine.submit(work(prompts[2], 9)))
    answers, before = {}, watched.n_passes
    while watched.engine.in_flight:
        answers |= watched.step()
        if uids[0] not in answers:
            assert watched.n_passes == before + 1, "beside others a first token changes nothing"
            before += 1
    assert [answers[uid] for uid in uids] == [layout.alone(ids, 9) for ids in prompts]


def test_a_first_token_that_a_preemption_brings_out_is_timed():
    engine = Layout("llama", eos=False).engine()
    uid = engine.submit(work(random_ids(random.Random(5), 1), 9))
    engine.step()
    assert engine.progress()[uid].tokens == 0
    assert not list(engine._preempt(next(iter(engine._scheduler))))
    assert engine.progress()[uid].tokens == 1
    assert engine.cancel(uid).timing.decode_s > 0


def test_an_answer_of_one_token_that_nobody_keeps_takes_one_pass(monkeypatch):
    layout = Layout("llama", eos=False)
    watched, ids = Watched(layout, monkeypatch), random_ids(random.Random(4), 1)
    uid = watched.engine.submit(work(ids, 1, is_saved=False))
    watched.step()
    assert (watched.step(), watched.n_passes) == ({uid: layout.alone(ids, 1)}, 1)
    assert not watched.engine.in_flight
