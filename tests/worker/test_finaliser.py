"""The finaliser: what one agent's disk does to the others, and what is left when it is told to end."""

import threading
from types import SimpleNamespace

import pytest

from stoker_shared import build_request
from stoker_worker.conversation import Prompt
from stoker_worker.finaliser import Finaliser
from stoker_worker.loader import Ended, Prepared
from stoker_worker.ports import AgentVersion, ClaimedJob, Completion, Delivery, GenerationWork, Restored

MODEL = SimpleNamespace(name="m", fingerprint="f", tokenizer_fingerprint="t")


class Queue:
    """Remembers what became of each job."""

    def __init__(self):
        self.finished, self.given_back = [], []

    def owns(self, job):
        return True

    def finish(self, job, result):
        self.finished.append(job.job_id)

    def give_back(self, jobs, *, counts_as_attempt):
        self.given_back += [job.job_id for job in jobs]


class Store:
    """Saves at once, except for the agent whose disk hangs."""

    def __init__(self):
        self.release = threading.Event()

    def save(self, turn):
        if turn.agent_id == "slow":
            self.release.wait(30)
        return turn.parent + 1, turn.result_of(turn.parent + 1)


def claimed(agent_id, claimed_at=0.0):
    request = build_request({"agent_id": agent_id, "prompt": "p"})
    delivery = Delivery(f"job-{agent_id}", "2026")
    return ClaimedJob(f"job-{agent_id}", "q", request, delivery, 1, 0.0, claimed_at, None, None)


def finished(agent_id):
    job = claimed(agent_id)
    prepared = Prepared(
        job,
        AgentVersion(agent_id, 0, None),
        Prompt((1, 2), None, "p"),
        Restored(None, "none"),
        GenerationWork(job.request, (1, 2)),
        None,
        0,
        0.0,
    )
    done = Completion(0, "finished", generated_ids=(3,), text="x", ended_by="length", kept=1)
    return Ended(job, prepared, done)


@pytest.fixture
def running():
    queue, store, ended = Queue(), Store(), threading.Semaphore(0)
    finaliser = Finaliser(queue, store, MODEL, on_ended=lambda job_id: ended.release())
    finaliser.start()
    yield finaliser, queue, store, ended
    store.release.set()
    finaliser.finish()
    finaliser.join()


def test_a_disk_that_hangs_for_one_agent_holds_up_no_other_agents_result(running):
    finaliser, queue, store, ended = running
    for agent_id in ("slow", "a", "b", "c", "d"):
        finaliser.put(finished(agent_id))
    for _ in range(4):
        assert ended.acquire(timeout=20)
    assert sorted(queue.finished) == ["job-a", "job-b", "job-c", "job-d"]
    store.release.set()
    assert ended.acquire(timeout=20)
    assert queue.finished[-1] == "job-slow"


def test_jobs_cut_short_go_back_in_order_after_the_last_result_was_posted(running):
    finaliser, queue, store, _ = running
    for n, agent_id in enumerate("abcdef"):
        job = claimed(agent_id, claimed_at=float(n))
        job.cancel.set("stopping")
        finaliser.put(Ended(job))
    finaliser.put(finished("slow"))
    finaliser.finish()
    store.release.wait(0.3)
    assert queue.given_back == []  # a result is still on its way
    store.release.set()
    finaliser.join()
    assert queue.finished == ["job-slow"]
    assert queue.given_back == [f"job-{agent_id}" for agent_id in "fedcba"]  # each to the front: the first one last
