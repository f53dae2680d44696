"""The engine thread: the jobs that enter the engine together, and its outcomes."""

import threading
import weakref
from concurrent.futures import Future
from queue import Empty, Queue
from types import SimpleNamespace

import pytest
from tests.in_memory.queue import InMemoryQueue
from tests.support.wait import wait_for
from tests.worker.pipeline.stages import NotedFinisher, loaded_job

from stoker_shared.answer_parts import Markers
from stoker_worker.pipeline import engine_thread
from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.job import Cancelled, GivenBack
from stoker_worker.ports import CompletedGeneration, TextSoFar


class Engine:
    """Each allowed step ends the sequences submitted before it; `steps` lists the sequences in each step."""

    kv = None

    def __init__(self):
        self.steps, self.may_step, self._running, self._next_uid = Queue(), threading.Semaphore(0), {}, 0
        self.asked = []

    @property
    def in_flight(self):
        return len(self._running)

    def submit(self, work):
        self._running[self._next_uid] = work.request.agent_id
        self._next_uid += 1
        return self._next_uid - 1

    def step(self):
        self.steps.put(sorted(self._running.values()))
        assert self.may_step.acquire(timeout=30)
        stay = {uid: agent for uid, agent in self._running.items() if agent == "long" and self.may_step.acquire(False)}
        ended, self._running = [uid for uid in self._running if uid not in stay], stay
        return [
            CompletedGeneration(uid, "finished", generated_ids=(3,), text="x", ended_by="length", kept=1)
            for uid in ended
        ]

    def cancel(self, uid):
        self._running.pop(uid)

    def progress(self):
        return {}

    def text(self, uid):
        self.asked.append(uid)
        return f"text of {self._running[uid]}"

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
    engine.may_step.release(100)
    thread.join(30)


def test_jobs_that_the_loader_has_almost_ready_join_the_batch_together(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, _ = running
    thread.put(ready("a", has_next=True))
    with pytest.raises(Empty):
        engine.steps.get(timeout=0.1)
    thread.put(ready("b", has_next=True))
    thread.put(ready("c", has_next=False))
    assert engine.steps.get(timeout=30) == ["a", "b", "c"]


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
        engine.steps.get(timeout=30)
        assert thread.texts(frozenset(asked)) == texts
        assert len(engine.asked) == calls
        engine.may_step.release(2)
    engine.steps.get(timeout=30)
    assert thread.texts(frozenset()) == {}


def test_a_job_does_not_wait_forever_for_one_that_loads_slowly(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 0.05)
    thread, engine, _ = running
    thread.put(ready("a", has_next=True))
    assert engine.steps.get(timeout=30) == ["a"]


def test_running_sequences_go_on_while_others_are_gathered(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, _ = running
    thread.put(ready("long", has_next=False))
    assert engine.steps.get(timeout=30) == ["long"]
    thread.put(ready("a", has_next=True))
    engine.may_step.release(2)  # once to take the step, once more for "long" to stay
    assert engine.steps.get(timeout=30) == ["long"]
    thread.put(ready("b", has_next=False))
    engine.may_step.release(2)
    assert engine.steps.get(timeout=30) == ["a", "b", "long"]


def test_gathered_jobs_are_given_back_if_the_engine_breaks(running, monkeypatch):
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30)
    thread, engine, finisher = running
    thread.put(ready("long", has_next=False))
    assert engine.steps.get(timeout=30) == ["long"]
    thread.put(ready("a", has_next=True))
    engine.may_step.release(2)
    engine.steps.get(timeout=30)
    engine.step = None  # the next call breaks
    engine.may_step.release(2)
    thread.join(30)
    assert thread.error is not None
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
    assert engine.steps.get(timeout=30) == ["b"]
    assert finisher.next() == (withdrawn, Cancelled())


def test_an_idle_engine_thread_holds_no_arrays_of_the_last_sequence(running):
    thread, engine, finisher = running
    thread.put(ready("a", has_next=False))
    engine.may_step.release()
    job, outcome = finisher.next()
    held = weakref.ref(outcome.completion)
    del job, outcome
    wait_for(lambda: held() is None)
