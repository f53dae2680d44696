"""The engine loop: which jobs go into the engine together."""

import threading
from queue import Empty, Queue
from types import SimpleNamespace

import pytest

from stoker_shared import build_request
from stoker_worker import engine_loop
from stoker_worker.conversation import Prompt
from stoker_worker.engine_loop import EngineLoop
from stoker_worker.loader import Prepared
from stoker_worker.ports import AgentVersion, ClaimedJob, Completion, Delivery, GenerationWork, Restored


class Engine:
    """Each step ends what was submitted before the test let it happen; `steps` says which rows were in it together."""

    def __init__(self):
        self.steps, self.may_step, self._rows, self._next_uid = Queue(), threading.Semaphore(0), {}, 0
        self.asked = []

    @property
    def in_flight(self):
        return len(self._rows)

    def submit(self, work):
        self._rows[self._next_uid] = work.request.agent_id
        self._next_uid += 1
        return self._next_uid - 1

    def step(self):
        self.steps.put(sorted(self._rows.values()))
        assert self.may_step.acquire(timeout=30)
        stay = {uid: agent for uid, agent in self._rows.items() if agent == "long" and self.may_step.acquire(False)}
        ended, self._rows = [uid for uid in self._rows if uid not in stay], stay
        return [Completion(uid, "finished", generated_ids=(3,), text="x", ended_by="length", kept=1) for uid in ended]

    def cancel(self, uid):
        self._rows.pop(uid)

    def progress(self):
        return {}

    def text(self, uid):
        self.asked.append(uid)
        return f"text of {self._rows[uid]}"

    def close(self):
        pass


def ready(agent_id, *, has_next):
    request = build_request({"agent_id": agent_id, "prompt": "p"})
    job = ClaimedJob(f"job-{agent_id}", "q", request, Delivery(f"job-{agent_id}", "2026"), 1, 0.0, 0.0, 0, None, None)
    work, prompt = GenerationWork(request, (1, 2)), Prompt((1, 2), None, "p")
    return Prepared(job, AgentVersion(agent_id, 0, None), prompt, Restored(None, "none"), work, None, 0.0, has_next)


@pytest.fixture
def running():
    engine, ended = Engine(), Queue()
    provider = SimpleNamespace(load=lambda: (engine, SimpleNamespace()), leave_thread=lambda: None)
    loop = EngineLoop(provider, to_finaliser=ended.put, on_broken=lambda: None)
    loop.start()
    yield loop, engine, ended
    loop.finish()
    engine.may_step.release(100)
    loop.join(30)


def test_jobs_that_the_loader_is_about_to_have_ready_join_the_batch_together(running, monkeypatch):
    monkeypatch.setattr(engine_loop, "_GATHER_S", 30)
    loop, engine, _ = running
    loop.put(ready("a", has_next=True))
    with pytest.raises(Empty):
        engine.steps.get(timeout=0.1)
    loop.put(ready("b", has_next=True))
    loop.put(ready("c", has_next=False))
    assert engine.steps.get(timeout=30) == ["a", "b", "c"]


def test_a_text_is_put_together_once_for_each_time_that_somebody_asks(running):
    loop, engine, _ = running
    loop.put(ready("long", has_next=False))
    for asked, calls, texts in (({0}, 0, {}), (set(), 1, {0: "text of long"}), ({1}, 1, {0: "text of long"})):
        engine.steps.get(timeout=30)
        assert loop.listen(frozenset(asked)) == texts
        assert len(engine.asked) == calls
        engine.may_step.release(2)
    engine.steps.get(timeout=30)
    assert loop.listen(frozenset()) == {}


def test_a_job_does_not_wait_for_ever_for_one_that_takes_long_to_load(running, monkeypatch):
    monkeypatch.setattr(engine_loop, "_GATHER_S", 0.05)
    loop, engine, _ = running
    loop.put(ready("a", has_next=True))
    assert engine.steps.get(timeout=30) == ["a"]


def test_rows_in_the_batch_go_on_while_others_are_gathered(running, monkeypatch):
    monkeypatch.setattr(engine_loop, "_GATHER_S", 30)
    loop, engine, _ = running
    loop.put(ready("long", has_next=False))
    assert engine.steps.get(timeout=30) == ["long"]
    loop.put(ready("a", has_next=True))
    engine.may_step.release(2)  # once to take the step, once more for "long" to stay
    assert engine.steps.get(timeout=30) == ["long"]
    loop.put(ready("b", has_next=False))
    engine.may_step.release(2)
    assert engine.steps.get(timeout=30) == ["a", "b", "long"]


def test_jobs_that_were_gathered_when_the_engine_broke_are_given_back(running, monkeypatch):
    monkeypatch.setattr(engine_loop, "_GATHER_S", 30)
    loop, engine, ended = running
    loop.put(ready("long", has_next=False))
    assert engine.steps.get(timeout=30) == ["long"]
    loop.put(ready("a", has_next=True))
    engine.may_step.release(2)
    engine.steps.get(timeout=30)
    engine.step = None  # whatever is called next breaks
    engine.may_step.release(2)
    loop.join(30)
    assert loop.error is not None
    loop.put(ready("b", has_next=False))
    loop.give_up_waiting()
    by_job = {one.job.job_id: one for one in (ended.get(timeout=30) for _ in range(3))}
    assert str(by_job["job-long"].error).startswith("TypeError")
    assert {by_job[f"job-{agent}"].job.cancel.reason for agent in "ab"} == {"stopping"}


def test_a_job_cancelled_while_it_was_gathered_never_enters_the_engine(running, monkeypatch):
    monkeypatch.setattr(engine_loop, "_GATHER_S", 30)
    loop, engine, ended = running
    withdrawn = ready("a", has_next=True)
    loop.put(withdrawn)
    withdrawn.job.cancel.set("withdrawn")
    loop.put(ready("b", has_next=False))
    assert engine.steps.get(timeout=30) == ["b"]
    assert ended.get(timeout=30).job is withdrawn.job
