"""The engine thread: which jobs enter the engine together, a job's choices, and how jobs end."""

import itertools
import random
import weakref
from concurrent.futures import Future
from queue import Empty, Queue
from types import SimpleNamespace

import pytest
from tests.support.in_memory.queue import InMemoryQueue
from tests.support.wait import wait_for
from tests.worker.engine.layouts import Layout, prefix_of, random_ids, run, work
from tests.worker.pipeline.stages import MODEL, TIMEOUT_S, NotedFinisher, loaded_job

from stoker_shared.answer_parts import Markers
from stoker_shared.errors import BlockPoolTooSmall, GenerationTimedOut
from stoker_shared.result import CacheReport
from stoker_worker.pipeline import engine_thread
from stoker_worker.pipeline.answer import build_result, read_answer
from stoker_worker.pipeline.engine_thread import Choices, EngineThread, works_of
from stoker_worker.pipeline.job import Cancelled, Failed, Finished, GivenBack
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import CompletedGeneration, Restored, SequenceCache, SequenceProgress, TextSoFar


def end(uid, outcome="finished", n_tokens=2, **fields):
    return CompletedGeneration(uid, outcome, tuple(range(n_tokens)), f"text {uid}", "length", n_tokens, **fields)


class Engine:
    """A step ends the sequences that the test puts into `ends` (``None``: all), and waits for that.

    Attributes:
        steps: the agents of the sequences in each step.
        left: the agents of those in the engine, by uid.
        refused: this uid is not taken.
        asked: uids of each call of `text`.
    """

    kv = None

    def __init__(self):
        self.steps, self.ends, self.left, self.refused, self.asked = Queue(), Queue(), {}, None, []
        self._uids = itertools.count()

    @property
    def in_flight(self):
        return len(self.left)

    def submit(self, work):
        uid = next(self._uids)
        if uid == self.refused:
            raise BlockPoolTooSmall("no")
        self.left[uid] = work.request.agent_id
        return uid

    def step(self):
        self.steps.put(sorted(self.left.values()))
        ends = self.ends.get(timeout=TIMEOUT_S)
        ends = [end(uid) for uid in self.left] if ends is None else ends
        for one in ends:
            del self.left[one.uid]
        return ends

    def cancel(self, uid):
        return None if self.left.pop(uid, None) is None else end(uid, "cancelled", n_tokens=4)

    def progress(self):
        return {}

    def text(self, uid):
        self.asked.append(uid)
        return f"text of {self.left[uid]}"

    def close(self):
        pass


def ready(agent_id, *, has_next):
    return loaded_job(InMemoryQueue(), agent_id, has_next=has_next)


@pytest.fixture
def running():
    engine, finisher = Engine(), NotedFinisher()
    provider = SimpleNamespace(load=lambda: (engine, SimpleNamespace()), leave_thread=lambda: None)
    thread = EngineThread(provider, Future(), finisher)
    thread.start()
    yield thread, engine, finisher
    thread.finish()
    for _ in range(10):
        engine.ends.put(None)
    thread.join(TIMEOUT_S)


def test_jobs_that_the_loader_has_almost_ready_join_the_batch_together(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, _ = running
    thread.put(ready("a", has_next=True))
    with pytest.raises(Empty):
        engine.steps.get(timeout=0.1)
    thread.put(ready("b", has_next=True))
    thread.put(ready("c", has_next=False))
    assert engine.steps.get(timeout=TIMEOUT_S) == ["a", "b", "c"]


def test_a_text_is_decoded_once_for_each_request(running):
    thread, engine, _ = running
    job = ready("long", has_next=False)
    number = job.claimed.claim_number
    thread.put(job)
    for asked, calls, texts in (
        ({number}, 0, {}),
        (set(), 1, {number: TextSoFar("text of long", Markers())}),
        ({-1}, 1, {number: TextSoFar("text of long", Markers())}),
    ):
        engine.steps.get(timeout=TIMEOUT_S)
        assert thread.texts(frozenset(asked)) == texts
        assert len(engine.asked) == calls
        engine.ends.put([])
    engine.steps.get(timeout=TIMEOUT_S)
    assert thread.texts(frozenset()) == {}


def test_a_job_does_not_wait_forever_for_one_that_loads_slowly(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 0.05)
    thread, engine, _ = running
    thread.put(ready("a", has_next=True))
    assert engine.steps.get(timeout=TIMEOUT_S) == ["a"]


def test_running_sequences_go_on_while_others_are_gathered(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, _ = running
    thread.put(ready("long", has_next=False))
    assert engine.steps.get(timeout=TIMEOUT_S) == ["long"]
    thread.put(ready("a", has_next=True))
    engine.ends.put([])
    assert engine.steps.get(timeout=TIMEOUT_S) == ["long"]
    thread.put(ready("b", has_next=False))
    engine.ends.put([])
    assert engine.steps.get(timeout=TIMEOUT_S) == ["a", "b", "long"]


def test_when_the_engine_breaks_gathered_jobs_are_given_back_and_nothing_is_in_progress(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, finisher = running
    thread.put(ready("long", has_next=False))
    assert engine.steps.get(timeout=TIMEOUT_S) == ["long"]
    thread.put(ready("a", has_next=True))
    engine.ends.put([])
    engine.steps.get(timeout=TIMEOUT_S)
    assert thread.progress().keys() == {"job-long"}
    engine.step = None  # the next call breaks
    engine.ends.put([])
    thread.join(TIMEOUT_S)
    assert thread.error is not None
    assert thread.progress() == {}
    thread.put(ready("b", has_next=False))
    thread.hand_over_waiting()
    outcomes = {job.job_id: outcome for job, outcome in (finisher.next() for _ in range(3))}
    assert outcomes == {
        "job-long": GivenBack(counts_as_attempt=True),
        "job-a": GivenBack(counts_as_attempt=False),
        "job-b": GivenBack(counts_as_attempt=False),
    }


def test_a_job_cancelled_while_it_is_gathered_never_enters_the_engine(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, finisher = running
    withdrawn = ready("a", has_next=True)
    thread.put(withdrawn)
    withdrawn.cancel.set("withdrawn")
    thread.put(ready("b", has_next=False))
    assert engine.steps.get(timeout=TIMEOUT_S) == ["b"]
    assert finisher.next() == (withdrawn, Cancelled())


def test_an_idle_engine_thread_holds_no_arrays_of_the_last_sequence(running):
    thread, engine, finisher = running
    thread.put(ready("a", has_next=False))
    engine.ends.put(None)
    job, outcome = finisher.next()
    held = weakref.ref(outcome.completion)
    del job, outcome
    wait_for(lambda: held() is None)


def test_a_job_is_handed_over_once_and_only_when_all_its_choices_have_ended(running):
    thread, engine, finisher = running
    job = job_of(3)
    thread.put(job)
    for uid in (1, 0):
        engine.steps.get(timeout=TIMEOUT_S)
        engine.ends.put([end(uid)])
    engine.steps.get(timeout=TIMEOUT_S)
    assert finisher.ended.empty()
    engine.ends.put([end(2)])
    ended, outcome = finisher.next()
    assert (ended, outcome.completion.text) == (job, "text 0")
    assert [one.text for one in job.further_choices] == ["text 1", "text 2"]
    assert not thread.is_busy()


def test_a_choice_that_fails_fails_the_job_and_ends_the_others(running):
    thread, engine, finisher = running
    thread.put(job_of(4))
    error = ValueError("x")
    engine.ends.put([end(2, "failed", error=error), end(3)])
    assert finisher.next()[1] == Failed(error)
    assert (engine.left, thread.is_busy(), finisher.ended.empty()) == ({}, False, True)


@pytest.mark.parametrize(("reason", "kind"), [("withdrawn", Cancelled), ("stopping", GivenBack), ("timed out", Failed)])
def test_all_choices_of_a_job_that_is_cancelled_leave_the_engine(running, reason, kind):
    thread, engine, finisher = running
    job = job_of(3)
    thread.put(job)
    engine.ends.put([end(1, n_tokens=2)])
    for _ in range(2):
        engine.steps.get(timeout=TIMEOUT_S)
    job.cancel.set(reason)
    engine.ends.put([])
    _, outcome = finisher.next()
    assert isinstance(outcome, kind)
    assert (engine.left, thread.is_busy()) == ({}, False)
    if kind is Failed:
        assert isinstance(outcome.error, GenerationTimedOut)
        assert "after 10 generated tokens" in str(outcome.error)
        assert outcome.partial_text == "text 0"


def test_a_choice_that_is_refused_leaves_none_of_the_others_in_the_engine(running):
    thread, engine, finisher = running
    engine.refused = 2
    thread.put(job_of(3))
    _, outcome = finisher.next()
    assert isinstance(outcome.error, BlockPoolTooSmall)
    assert (engine.left, thread.is_busy()) == ({}, False)


class PanicException(BaseException):
    """As a library in Rust raises, such as one for grammars."""


def test_a_panic_when_a_job_enters_the_engine_fails_that_job_alone(running):
    def panic():
        raise PanicException("index out of bounds")

    thread, engine, finisher = running
    job = job_of(2)
    job.guide = SimpleNamespace(fork=panic)
    thread.put(job)
    failed, outcome = finisher.next()
    assert (failed, str(outcome.error)) == (job, "PanicException: index out of bounds")
    assert engine.steps.get(timeout=TIMEOUT_S) == []
    engine.ends.put([])
    thread.put(ready("b", has_next=False))
    assert engine.steps.get(timeout=TIMEOUT_S) == ["b"]


SHARES = ("salt",)


def job_of(n, **fields):
    job = loaded_job(InMemoryQueue(), "a", cache="read", n=n, **fields)
    job.shares, job.is_saved = SHARES, True
    job.restored = Restored(SequenceCache(1, ()), "disk")
    return job


def test_each_choice_has_a_guide_of_its_own_and_the_prompt_is_scored_once():
    job = job_of(3, prompt_logprobs=2, prompt_logprobs_start=1)
    job.guide = SimpleNamespace(fork=SimpleNamespace)
    works = list(works_of(job))
    assert works[0].guide is job.guide
    assert len({id(work.guide) for work in works}) == 3
    asked = [(work.request.prompt_logprobs, work.request.prompt_logprobs_start) for work in works]
    assert asked == [(2, 1), (None, 0), (None, 0)]


def test_choices_of_a_job_that_shares_with_no_other_share_among_themselves():
    queue, keys = InMemoryQueue(), []
    for name in ("a", "b"):
        job = loaded_job(queue, name, cache="off", n=2)
        (key,) = {work.shares for work in works_of(job)}
        keys.append(key)
    assert len(set(keys)) == 2
    assert None not in keys
    (alone,) = works_of(loaded_job(queue, "c", cache="off"))
    assert alone.shares is None


def result_of(job, completion):
    answers = [read_answer(job.request, job.prompt, one, MODEL, "") for one in (completion, *job.further_choices)]
    return build_result(job, completion, answers, MODEL, CacheReport())


def test_the_result_has_all_choices_in_order_and_the_first_one_at_its_top():
    job = job_of(3)
    choices = Choices(job, [5, 6, 7])
    assert [choices.end(end(uid, n_tokens=uid)) for uid in (6, 5, 7)] == [False, False, True]
    outcome = choices.outcome()
    assert isinstance(outcome, Finished)
    result = result_of(job, outcome.completion)
    assert [choice.text for choice in result.choices] == ["text 5", "text 6", "text 7"]
    assert (result.text, result.finish_reason) == ("text 5", "length")
    assert (result.usage.completion_tokens, result.usage.prompt_tokens) == (18, len(job.prompt.ids))
    assert result_of(job_of(1), outcome.completion).choices is None


def test_progress_is_that_of_all_choices_and_the_text_that_of_the_first():
    choices = Choices(job_of(3), [0, 1, 2])
    engine = SimpleNamespace(text=lambda uid: f"running {uid}")
    of = {0: SequenceProgress("decode", 4, 2.0), 1: SequenceProgress("prefill"), 2: SequenceProgress("waiting")}
    assert choices.progress(of) == SequenceProgress("decode", 4, 2.0)
    assert choices.text_so_far(engine).text == "running 0"
    choices.end(end(0, n_tokens=7))
    assert choices.progress({1: SequenceProgress("decode", 3, 1.0)}) == SequenceProgress("decode", 10, 1.0)
    assert choices.text_so_far(engine).text == "text 0"


@pytest.mark.mlx
@pytest.mark.parametrize("restored", [False, True])
def test_four_choices_are_the_answers_of_four_jobs_and_their_prompt_is_prefilled_once(restored):
    layout = Layout("llama", eos=False)
    ids = tuple(random_ids(random.Random(4), 400))
    prefix = None
    if restored:
        (before,) = run(layout.engine(), [work(ids[:300], 1)])
        prefix = prefix_of(before.cache, 256)
    job = job_of(4, temperature=1.2, top_p=0.9, seed=7, max_tokens=12, presence_penalty=1.0)
    job.prompt, job.restored = Prompt(ids, None, ""), Restored(prefix, "disk" if prefix else "none")
    together = run(layout.engine(max_batch=8), list(works_of(job)))
    fields = {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 1.0}
    alone = [run(layout.engine(), [work(ids, 12, seed=7 + i, **fields)])[0] for i in range(4)]
    assert [end.generated_ids for end in together] == [end.generated_ids for end in alone]
    assert len({end.generated_ids for end in alone}) == 4
    assert [end.cached_tokens for end in together] == [256 if restored else 0, 399, 399, 399]
    assert [end.cache is not None for end in together] == [True, False, False, False]
