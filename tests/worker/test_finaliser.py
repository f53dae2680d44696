"""The finaliser: what one agent's disk does to the others, and what is left when it is told to end."""

import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from redis.exceptions import BusyLoadingError, ExecAbortError, OutOfMemoryError, ReadOnlyError, ResponseError

from stoker_shared import build_request
from stoker_shared.errors import EngineFailed
from stoker_worker.conversation import Prompt
from stoker_worker.finaliser import Finaliser
from stoker_worker.loader import Ended, Prepared
from stoker_worker.ports import AgentVersion, CacheSlice, ClaimedJob, Completion, Delivery, GenerationWork, Restored

MODEL = SimpleNamespace(name="m", fingerprint="f", tokenizer_fingerprint="t")


class Queue:
    """Remembers what became of each job."""

    def __init__(self):
        self.finished, self.given_back, self.lease_lost = [], [], False
        self.dropped, self.losses = [], []
        self.answers = []  # what Redis says to the next calls of `finish`

    def owns(self, job):
        return True

    def finish(self, job, result):
        if self.answers:
            raise self.answers.pop(0)
        self.finished.append(job.job_id)

    def drop(self, job):
        self.dropped.append(job.job_id)

    def give_back(self, jobs, *, counts_as_attempt, alone=False):
        if self.lease_lost:
            return 0
        for job in jobs:
            if job.job_id == "job-odd":
                raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        self.given_back += [job.job_id for job in jobs]
        self.losses += ["alone" if alone else "among others"] if counts_as_attempt else []
        return len(jobs)


class Store:
    """Saves at once, except for the agent whose disk hangs."""

    def __init__(self):
        self.release = threading.Event()

    def save(self, turn):
        if turn.agent_id == "slow":
            self.release.wait(30)
        return turn.parent + 1, turn.result_of(turn.parent + 1)


def claimed(agent_id, claim_number=0, claimed_at=0.0):
    request = build_request({"agent_id": agent_id, "prompt": "p"})
    delivery = Delivery(f"job-{agent_id}", "2026")
    return ClaimedJob(f"job-{agent_id}", "q", request, delivery, 1, 0.0, claimed_at, claim_number, None, None)


def finished(agent_id):
    job = claimed(agent_id)
    prepared = Prepared(
        job,
        AgentVersion(agent_id, 0, None),
        Prompt((1, 2), None, "p"),
        Restored(None, "none"),
        GenerationWork(job.request, (1, 2)),
        None,
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


def test_late_results_of_a_deposed_worker_are_dropped_and_counted(running, caplog):
    finaliser, queue, _, ended = running
    queue.owns = lambda job: False
    for agent_id in "ab":
        finaliser.put(finished(agent_id))
        assert ended.acquire(timeout=20)
    assert queue.finished == []
    assert queue.dropped == ["job-a", "job-b"]
    assert [line for line in caplog.messages if "dropped" in line] == [
        "result dropped, number 1 of this worker: job job-a is no longer this worker's",
        "result dropped, number 2 of this worker: job job-b is no longer this worker's",
    ]


BUSY_NOW = [
    BusyLoadingError("Redis is loading the dataset in memory"),
    OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    ReadOnlyError("You can't write against a read only replica."),
    ResponseError("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk."),
    ResponseError("Command # 2 (HSET rq:job:a ...) of pipeline caused error: MISCONF Errors writing to the AOF file"),
    ExecAbortError("Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'."),
    ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."),
    ResponseError("NOREPLICAS Not enough good replicas to write."),
    ResponseError("Error running script (call to f_0f): @user_script:3: @user_script: 3: -OOM command not allowed"),
]


@pytest.mark.parametrize("error", BUSY_NOW, ids=lambda error: str(error)[:20])
def test_a_result_waits_for_a_server_that_cannot_write_just_now(error):
    queue, ended = Queue(), threading.Event()
    queue.answers = [error]
    finaliser = Finaliser(queue, Store(), MODEL, on_ended=lambda job_id: ended.set(), retry_s=0.01)
    finaliser.start()
    finaliser.put(finished("a"))
    assert ended.wait(20)
    finaliser.finish()
    finaliser.join()
    assert queue.finished == ["job-a"]


def cut_short(finaliser, *agent_ids):
    for n, agent_id in enumerate(agent_ids):
        job = claimed(agent_id, claim_number=n, claimed_at=-float(n))  # as if somebody set the clock
        job.cancel.set("stopping")
        finaliser.put(Ended(job))


def test_jobs_cut_short_go_back_in_order_after_the_last_result_was_posted(running):
    finaliser, queue, store, _ = running
    cut_short(finaliser, *"abcdef")
    finaliser.put(finished("slow"))
    finaliser.finish()
    store.release.wait(0.3)
    assert queue.given_back == []  # a result is still on its way
    store.release.set()
    finaliser.join()
    assert queue.finished == ["job-slow"]
    assert queue.given_back == [f"job-{agent_id}" for agent_id in "fedcba"]  # each to the front: the first one last


def test_one_job_that_cannot_be_given_back_keeps_no_other_from_it(running, caplog):
    finaliser, queue, *_ = running
    cut_short(finaliser, "a", "odd", "b")
    with caplog.at_level(logging.INFO):
        finaliser.finish()
        finaliser.join()
    assert queue.given_back == ["job-b", "job-a"]
    assert "2 jobs given back" in caplog.messages


def test_a_deposed_worker_does_not_claim_to_have_given_jobs_back(running, caplog):
    finaliser, queue, *_ = running
    queue.lease_lost = True
    cut_short(finaliser, "a", "b")
    with caplog.at_level(logging.INFO):
        finaliser.finish()
        finaliser.join()
    assert "jobs given back" not in caplog.text
    assert "2 jobs not given back" in caplog.text


@pytest.mark.parametrize(("n_rows", "losses"), [(1, ["alone"]), (2, ["among others"] * 2)])
def test_a_job_that_was_alone_in_an_engine_that_broke_is_told_apart(running, n_rows, losses):
    finaliser, queue, _, ended = running
    for number in range(n_rows):
        finaliser.put(Ended(claimed(f"row {number}", number), error=EngineFailed("broke")))
    stopping = claimed("loaded", 9)
    stopping.cancel.set("stopping")
    finaliser.put(Ended(stopping))
    for _ in range(n_rows + 1):
        assert ended.acquire(timeout=20)
    finaliser.finish()
    finaliser.join()
    assert queue.losses == losses
    assert len(queue.given_back) == n_rows + 1


def test_shared_blocks_that_cannot_be_written_fail_no_job(running, caplog):
    finaliser, queue, store, ended = running
    saved = []

    def save_blocks(token_ids, cache, *, model, salt):
        saved.append((len(token_ids), cache.start, cache.stop, salt))
        raise OSError("disk full")

    store.save_blocks = save_blocks
    done = finished("a")
    request = build_request({"prompt": "p"})
    ids = tuple(range(700))
    prepared = replace(
        done.prepared,
        job=replace(done.job, request=request),
        agent=None,
        prompt=Prompt(ids, None, "p"),
        restored=Restored(None, "none", saved_blocks=1, shared_blocks=2),
        salt="tenant",
    )
    completion = replace(done.completion, cache=CacheSlice(256, 701, ()))
    with caplog.at_level(logging.WARNING):
        finaliser.put(Ended(prepared.job, prepared, completion))
        assert ended.acquire(timeout=20)
    assert saved == [(512, 256, 701, "tenant")]
    assert queue.finished == ["job-a"]
    assert "its blocks are not saved: OSError: disk full" in caplog.text
