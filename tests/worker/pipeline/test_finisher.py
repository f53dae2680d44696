"""The finisher: a slow disk for one agent, an outage of Redis, and the jobs left at a stop."""

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.in_memory.queue import InMemoryJob, InMemoryQueue
from tests.support.wait import wait_for
from tests.worker.memory.agents import FastDisk
from tests.worker.pipeline.stages import TIMEOUT_S, PlayedStore, claimed, generated, loaded_job, loaded_model

from stoker_shared.agents import AgentInfo, build_agent_request
from stoker_shared.errors import (
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    AgentVersionNotSaved,
    JobLost,
    VersionTaken,
    WorkerLostTooOften,
)
from stoker_shared.request import build_request
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.pipeline import finisher
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.job import AgentChange, Cancelled, Failed, GivenBack, Job, Replayed
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.pipeline.worker import Worker
from stoker_worker.ports import Delivery, Restored, SequenceCache
from stoker_worker.settings import read_settings

TO_GIVE_BACK = GivenBack(counts_as_attempt=False)


class Scene:
    """Saves of the agent in `slow` wait until `disk` is set."""

    def __init__(self) -> None:
        self.queue, self.store = InMemoryQueue(), PlayedStore()
        self.slow: str | None = None
        self.disk = threading.Event()
        self.store.before_write = self._before_write
        self.finisher = Finisher(self.store, loaded_model(), retry_s=0.01)

    def _before_write(self, agent_id: str | None) -> None:
        if agent_id is not None and agent_id == self.slow:
            self.disk.wait(TIMEOUT_S)

    def put_finished(self, agent_id: str, **fields: Any) -> Job:
        job = loaded_job(self.queue, agent_id, **fields)
        self.finisher.put(job, generated())
        return job

    def states(self, *agents: str) -> list[str]:
        return [self.queue.state(f"job-{agent}") for agent in agents]

    def wait_for_release(self, n_left: int = 0) -> None:
        wait_for(lambda: len(self.queue.in_flight()) <= n_left)

    def finish(self) -> None:
        self.finisher.finish()
        self.join()

    def join(self) -> None:
        for thread in self.finisher.threads:
            thread.join()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.finisher.start()
    yield scene
    scene.disk.set()
    scene.queue.away = False
    scene.finish()


def test_a_disk_that_hangs_for_one_agent_delays_no_other_agents_result(scene: Scene) -> None:
    scene.slow = "slow"
    for agent_id in ("slow", "a", "b", "c", "d"):
        scene.put_finished(agent_id)
    scene.wait_for_release(n_left=1)
    assert scene.states("slow", "a", "b", "c", "d") == ["started"] + ["finished"] * 4
    scene.disk.set()
    scene.wait_for_release()
    assert scene.states("slow") == ["finished"]


def test_the_time_of_a_result_includes_its_save(scene: Scene) -> None:
    saved_at: list[float] = []
    scene.store.before_write = lambda agent_id: saved_at.append(time.time())
    job = scene.put_finished("a")
    scene.wait_for_release()
    entry = scene.queue.entries["job-a"]
    assert entry.result is not None
    assert entry.result["timing"]["total_s"] >= round(saved_at[0] - job.claimed.enqueued_at, 3) - 1e-3


def test_a_job_that_redis_has_lost_ends_in_a_log_line_with_its_id_and_saves_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(job: object) -> bool:
        raise JobLost("Redis has lost data")

    monkeypatch.setattr(InMemoryJob, "is_ours", lost)
    for agent_id, outcome in (("a", generated()), ("b", Cancelled())):
        scene.finisher.put(loaded_job(scene.queue, agent_id), outcome)
        scene.wait_for_release()
    assert [scene.store.open_agent(agent_id).number for agent_id in "ab"] == [0, 0]
    assert [line for line in caplog.messages if "job=" in line] == [
        "lost job=job-a agent=a reason='Redis has lost data'",
        "lost job=job-b agent=b reason='Redis has lost data'",
    ]


def test_a_stop_while_redis_is_away_saves_finished_turns_and_leaves_the_rest_to_recovery(scene: Scene) -> None:
    finished, cut_short = loaded_job(scene.queue, "a"), loaded_job(scene.queue, "b")
    change = Job(claimed(scene.queue, job_id="job-c", request=FORGET))
    scene.queue.away = True
    scene.finisher.put(finished, generated())
    scene.finisher.put(change, AgentChange(FORGET))
    scene.finisher.put(cut_short, TO_GIVE_BACK)
    scene.finisher.abandon()
    scene.finish()
    assert scene.queue.in_flight() == ()
    assert scene.states("a", "b", "c") == ["started"] * 3
    answer = scene.store.answer("a", finished.claimed.delivery)
    assert answer is not None  # so the next worker answers from the history
    assert answer["text"] == "x"
    assert scene.store.open_agent("b").number == 0


def test_interrupted_jobs_go_back_in_order_after_the_last_result_was_posted(scene: Scene) -> None:
    scene.slow = "slow"
    for agent_id in "abcdef":
        scene.finisher.put(loaded_job(scene.queue, agent_id), TO_GIVE_BACK)
    scene.put_finished("slow")
    scene.finisher.finish()
    scene.disk.wait(0.3)
    assert scene.queue.given_back == []  # a result is not posted yet
    assert len(scene.queue.in_flight()) == 7  # so no slot is free for another job
    scene.disk.set()
    scene.join()
    assert scene.states("slow") == ["finished"]
    assert scene.queue.waiting == [f"job-{agent_id}" for agent_id in "abcdef"]
    assert scene.queue.in_flight() == ()


def test_one_job_that_cannot_be_given_back_stops_no_other(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = InMemoryJob.give_back

    def give_back(job: InMemoryJob, *, counts_as_attempt: bool, alone: bool = False) -> bool:
        if job.job_id == "job-odd":
            raise ValueError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return real(job, counts_as_attempt=counts_as_attempt, alone=alone)

    monkeypatch.setattr(InMemoryJob, "give_back", give_back)
    for agent_id in ("a", "odd", "b"):
        scene.finisher.put(loaded_job(scene.queue, agent_id), TO_GIVE_BACK)
    with caplog.at_level(logging.INFO):
        scene.finish()
    assert scene.queue.given_back == ["job-b", "job-a"]
    assert "2 jobs given back" in caplog.messages
    assert scene.queue.in_flight() == ()  # recovery finds the odd one


def test_a_deposed_worker_does_not_report_jobs_as_given_back(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for agent_id in "ab":
        scene.finisher.put(loaded_job(scene.queue, agent_id), TO_GIVE_BACK)
    scene.queue.take_over()
    with caplog.at_level(logging.INFO):
        scene.finish()
    assert "jobs given back" not in caplog.text
    assert "2 jobs not given back" in caplog.text


@pytest.mark.parametrize(("n_running", "losses"), [(1, [(1, 1)]), (2, [(1, 0)] * 2)])
def test_a_job_that_was_alone_in_a_broken_engine_is_marked(
    scene: Scene, n_running: int, losses: list[tuple[int, int]]
) -> None:
    for number in range(n_running):
        scene.finisher.put(loaded_job(scene.queue, f"r{number}"), GivenBack(counts_as_attempt=True))
    scene.finisher.put(loaded_job(scene.queue, "loaded"), TO_GIVE_BACK)
    scene.finish()
    entries = [scene.queue.entries[f"job-r{number}"] for number in range(n_running)]
    assert [(entry.lost, entry.losses_alone) for entry in entries] == losses
    assert scene.queue.entries["job-loaded"].lost == 0
    assert len(scene.queue.given_back) == n_running + 1


@pytest.mark.parametrize(("session", "n_tokens"), [(None, 512), ("s", 701)])
def test_cache_for_later_jobs_is_kept_before_the_job_ends_and_fails_none_if_it_cannot_be_written(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, session: str | None, n_tokens: int
) -> None:
    saved = []

    def refuse(*args: Any, salt: str | None, **others: Any) -> None:
        saved.append((*map(len, args[:-1]), args[-1].n_tokens, salt, scene.queue.state("job")))
        raise OSError("disk full")

    for name in ("save_blocks", "save_session"):
        monkeypatch.setattr(scene.store, name, refuse)
    request = build_request({"prompt": "p", **({"session": session} if session else {})})
    job = Job(claimed(scene.queue, job_id="job"), None, Prompt(tuple(range(700)), None, "p"), filled_in=request)
    job.restored, job.salt = Restored(None, "none", to_share=512), "tenant"
    with caplog.at_level(logging.INFO):
        scene.finisher.put(job, generated(cache=SequenceCache(701, ())))
        scene.wait_for_release()
    assert saved == [(*([1] if session else []), n_tokens, 701, "tenant", "started")]
    assert scene.queue.state("job") == "finished"
    assert "its blocks are not saved: OSError: disk full" in caplog.text


@pytest.mark.parametrize("context", ["append", "full"])
def test_a_turn_whose_agent_was_changed_meanwhile_runs_again(scene: Scene, context: str) -> None:
    scene.put_finished("a")
    scene.wait_for_release()
    job = loaded_job(scene.queue, "a", job_id="late", context=context)  # loaded before the change
    scene.finisher.put(job, generated())
    scene.wait_for_release()
    entry = scene.queue.entries["late"]
    assert (entry.state, entry.lost, scene.queue.given_back) == ("queued", 0, ["late"])
    assert scene.store.open_agent("a").number == 1


FORGET = build_agent_request({"agent_id": "a", "action": "forget"})
DONE = AgentInfo(job_id="forget", agent_id="a", exists=True)


@dataclass
class PlayedJobs:
    """Changes of agents. `answered`: the result of an earlier one; `error`: of this one."""

    answered: AgentInfo | None = None
    error: Exception | None = None
    overtaken: bool = False

    def answer(self, request: object, delivery: object) -> AgentInfo | None:
        return self.answered

    def run(self, request: object, delivery: object) -> AgentInfo:
        if self.overtaken:
            self.answered = DONE
        if self.error is not None:
            raise self.error
        return DONE


@pytest.mark.parametrize(
    ("losses_alone", "jobs", "state", "error"),
    [
        (2, PlayedJobs(), "finished", None),
        (3, PlayedJobs(), "failed", WorkerLostTooOften),
        # It has taken effect: nothing is done again, however many workers it lost.
        (0, PlayedJobs(DONE, AssertionError()), "finished", None),
        (3, PlayedJobs(DONE, AssertionError()), "finished", None),
        (0, PlayedJobs(error=OSError("no space")), "failed", AgentVersionNotSaved),
        # A worker that was taken for dead has carried it out meanwhile.
        (0, PlayedJobs(error=AgentVersionConflict("taken"), overtaken=True), "finished", None),
        (0, PlayedJobs(error=AgentVersionConflict("not that version")), "failed", AgentVersionConflict),
        (0, PlayedJobs(error=VersionTaken("by another worker")), "queued", None),
    ],
)
def test_a_change_of_an_agent_is_made_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, losses_alone: int, jobs: PlayedJobs, state: str, error: type | None
) -> None:
    monkeypatch.setattr(scene.store, "agent_jobs", jobs)
    job = claimed(scene.queue, job_id="forget", request=FORGET, entry={"losses_alone": losses_alone})
    entry = scene.queue.entries["forget"]
    scene.finisher.put(Job(job), AgentChange(FORGET))
    scene.wait_for_release()
    assert (entry.state, type(entry.error) if entry.error else None) == (state, error)
    assert scene.queue.given_back == (["forget"] if state == "queued" else [])
    assert entry.result == (DONE.model_dump(mode="json") if state == "finished" else None)


def away(scene: Scene, context: str = "append") -> Job:
    """A finished turn that waits for the shared store."""
    scene.store.away = True
    job = scene.put_finished("a", context=context)
    wait_for(lambda: job.waits_since is not None)
    return job


def test_a_turn_waits_for_the_shared_store_and_other_jobs_go_on_meanwhile(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finisher, "_STORE_WAIT_S", 3600)
    away(scene)
    scene.put_finished("b", cache="off")
    scene.wait_for_release(n_left=1)
    assert scene.states("a", "b") == ["started", "finished"]
    scene.store.away = False
    scene.wait_for_release()
    assert scene.states("a") == ["finished"]
    assert scene.queue.given_back == []


@pytest.mark.parametrize("context", ["append", "full"])
def test_a_turn_that_may_have_been_sent_ends_no_job_when_the_disk_here_refuses_it_then(
    scene: Scene, context: str
) -> None:
    away(scene, context)
    scene.store.before_write = raise_no_space
    scene.store.away = False
    scene.wait_for_release()
    assert (scene.states("a"), scene.queue.entries["job-a"].lost) == (["queued"], 0)
    assert "a" not in scene.store.unsaved


@pytest.mark.parametrize("why", ["it has waited for long", "hurry", "stopping"])
def test_a_turn_that_waits_no_more_for_the_shared_store_goes_back_and_uses_up_no_try(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(finisher, "_STORE_WAIT_S", 3600)
    job = away(scene)
    if why == "hurry":
        scene.finisher.hurry()
    elif why == "stopping":
        job.cancel.set("stopping")
    else:
        assert job.waits_since is not None
        job.waits_since -= 3600
    scene.wait_for_release()
    entry = scene.queue.entries["job-a"]
    assert (entry.state, entry.lost, entry.error) == ("queued", 0, None)


@pytest.mark.parametrize("was_saving", [True, False])
def test_before_a_job_ends_without_a_turn_that_an_earlier_run_may_have_sent_its_number_is_closed(
    scene: Scene, was_saving: bool
) -> None:
    for agent_id, outcome in ("failed", Failed(ValueError("odd"))), ("stopped", Cancelled()):
        scene.finisher.put(Job(claimed(scene.queue, agent_id, entry={"was_saving": was_saving})), outcome)
    scene.wait_for_release()
    assert sorted(scene.store.closed) == (["failed", "stopped"] if was_saving else [])
    assert scene.states("failed", "stopped") == ["failed", "stopped"]


def test_a_job_whose_finish_raises_is_failed_and_its_slot_is_freed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(job: InMemoryJob, result: object) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(InMemoryJob, "finish", finish)
    scene.put_finished("a")
    scene.wait_for_release()
    assert scene.states("a") == ["failed"]


def test_a_job_is_released_only_after_all_steps_of_its_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: list[int] = []
    real = scene.store.ended

    def ended(*args: Any, **fields: Any) -> None:
        in_flight.append(len(scene.queue.in_flight()))
        real(*args, **fields)

    monkeypatch.setattr(scene.store, "ended", ended)
    scene.put_finished("a")
    scene.wait_for_release()
    scene.finisher.put(Job(claimed(scene.queue, job_id="forget", request=FORGET)), AgentChange(FORGET))
    scene.wait_for_release()
    assert scene.queue.state("forget") == "finished"
    assert in_flight == [1, 1]


Ends = list[tuple[str, str, str, float]]
"""The agent, the job, the job's state at that time, and how long it lives."""


@pytest.fixture
def ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Each end that the store was told of."""
    told: Ends = []

    def note(agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        told.append((agent_id, delivery.job_id, scene.queue.state(delivery.job_id), remember_s))

    monkeypatch.setattr(scene.store, "ended", note)
    return told


def test_the_store_learns_how_long_an_answer_is_needed_once_its_job_has_ended(scene: Scene, ended: Ends) -> None:
    job, again = loaded_job(scene.queue, "a"), loaded_job(scene.queue, "b")
    scene.queue.entries["job-a"].lives_s = 77.0
    scene.finisher.put(job, generated())
    scene.wait_for_release(n_left=1)
    scene.finisher.put(again, Replayed({"text": "before"}))
    scene.wait_for_release()
    fork = build_agent_request({"agent_id": "a", "action": "fork", "target": "c"})
    scene.finisher.put(Job(claimed(scene.queue, job_id="fork", request=fork)), AgentChange(fork))
    scene.wait_for_release()
    assert ended == [
        ("a", "job-a", "finished", 77.0),
        ("b", "job-b", "finished", 3600.0),
        ("c", "fork", "finished", 3600.0),
    ]


def test_a_job_without_an_answer_in_the_store_leaves_nothing_to_forget(scene: Scene, ended: Ends) -> None:
    """Else a worker that only reads agents would collect what no commit ever takes from it."""
    scene.put_finished("a", cache="read", job_id="read")
    scene.put_finished("a", cache="off", context="full", job_id="off")
    scene.finisher.put(loaded_job(scene.queue, "b"), Failed(WorkerLostTooOften("alone, three times")))
    scene.wait_for_release()
    scene.store.before_write = raise_no_space
    scene.put_finished("c", context="full", job_id="not saved")
    scene.wait_for_release()
    assert scene.queue.state("not saved") == "finished"
    assert ended == []


@pytest.mark.parametrize("context", ["append", "full"])
def test_a_job_whose_lost_turn_cannot_be_remembered_fails(
    scene: Scene, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.store.before_write = raise_no_space
    monkeypatch.setattr(scene.store, "mark_unsaved", raise_no_space)
    scene.put_finished("a", context=context)
    scene.wait_for_release()
    assert isinstance(scene.queue.entries["job-a"].error, AgentVersionNotSaved)
    assert scene.store.open_agent("a").number == 0


def raise_no_space(agent_id: str | None) -> None:
    raise OSError("no space")


def test_a_result_that_could_not_be_posted_is_not_forgotten(scene: Scene, ended: Ends) -> None:
    """The queue is another worker's since the save: that one answers the job from the agent's history."""
    job = loaded_job(scene.queue, "a")

    def take_over(agent_id: str | None) -> None:
        scene.queue.take_over()

    scene.store.before_write = take_over
    scene.finisher.put(job, generated())
    scene.wait_for_release()
    assert scene.states("a") == ["started"]
    assert scene.store.answer("a", job.claimed.delivery) is not None
    assert ended == []


@pytest.mark.parametrize("context", ["append", "full"])
def test_a_turn_after_a_version_that_could_not_be_read_is_not_saved(tmp_path: Path, context: str) -> None:
    """Its index is damaged, so that nobody knows which version would be the next one."""
    store, queue = AgentCacheStore(tmp_path, files=FastDisk()), InMemoryQueue()
    options = {"burst": True, "poll_s": 0.001}
    queue.enqueue(job_id="first", agent_id="a", prompt="say so")
    Worker(read_settings(options), queue, store, ScriptedProvider(max_batch=1, steps_per_s=1000)).run()
    store.parts.database.commit(lambda connection: connection.execute("UPDATE agents SET key = x'00'"))
    queue.enqueue(job_id="next", agent_id="a", prompt="say more", context=context)
    Worker(read_settings(options), queue, store, ScriptedProvider(max_batch=1, steps_per_s=1000)).run()
    store.close()
    entry = queue.entries["next"]
    if context == "append":
        assert isinstance(entry.error, AgentTranscriptUnreadable)
        return
    assert entry.result is not None
    report = entry.result["cache"]
    assert (entry.result["text"], report["saved"], report["agent_version"]) == ("more", False, None)
    assert "could not be read" in report["save_error"]


def test_a_job_that_lost_too_many_workers_is_not_retried(scene: Scene) -> None:
    """A retry counts worker losses from zero again, so it would cost as many workers again."""
    scene.finisher.put(loaded_job(scene.queue, "a", retries=2), Failed(WorkerLostTooOften("alone, three times")))
    scene.wait_for_release()
    assert scene.states("a") == ["failed"]


def test_nothing_of_an_ended_job_stays_in_memory_while_no_other_ends(scene: Scene) -> None:
    """The completion holds the arrays of the job's cache."""
    job, outcome = loaded_job(scene.queue, "a"), generated()
    held = weakref.ref(outcome.completion)
    scene.finisher.put(job, outcome)
    del job, outcome
    scene.wait_for_release()
    wait_for(lambda: held() is None)
