"""The Mac stays awake while jobs are in flight: when the child that holds the assertion runs, and when it does not."""

import os
import platform

import pytest
from tests.support.in_memory.queue import InMemoryQueue
from tests.support.wait import wait_for
from tests.worker.pipeline.stages import TIMEOUT_S, NotedLoader
from tests.worker.pipeline.test_fetcher import fetcher_of

from stoker_worker.pipeline import wakefulness
from stoker_worker.pipeline.fetcher import Leaving
from stoker_worker.pipeline.wakefulness import Wakefulness, keep_awake_command


class Starts:
    """A command in the place of `caffeinate`, and a clock that stands."""

    def __init__(self, *command: str) -> None:
        self.now = 1000.0
        self.wakefulness = Wakefulness(command, now=lambda: self.now)

    def look(self, *, has_jobs: bool, after_s: float = 0) -> None:
        self.now += after_s
        self.wakefulness.look(has_jobs=has_jobs)

    def child(self) -> int | None:
        child = self.wakefulness._child
        return None if child is None or child.poll() is not None else child.pid


def test_the_assertion_is_held_from_the_first_job_until_a_minute_after_the_last():
    starts = Starts("sleep", "100")
    starts.look(has_jobs=False)
    assert starts.child() is None
    starts.look(has_jobs=True)
    held = starts.child()
    assert held is not None
    starts.look(has_jobs=True, after_s=3600)
    starts.look(has_jobs=False, after_s=50)
    assert starts.child() == held
    starts.look(has_jobs=False, after_s=11)
    assert starts.child() is None
    with pytest.raises(ProcessLookupError):
        os.kill(held, 0)
    starts.look(has_jobs=True)
    assert starts.child() not in (None, held)
    starts.wakefulness.end()
    assert starts.child() is None


def test_a_child_that_ends_by_itself_is_started_again_but_not_all_the_time():
    starts = Starts("false")
    starts.look(has_jobs=True)
    starts.wakefulness._child.wait(TIMEOUT_S)
    starts.look(has_jobs=True, after_s=1)
    assert starts.child() is None
    first = starts.wakefulness._child.pid
    starts.look(has_jobs=True, after_s=60)
    assert starts.wakefulness._child.pid != first
    starts.wakefulness.end()


def test_a_mac_without_the_program_still_runs_jobs(caplog):
    wakefulness = Wakefulness(["/nowhere/caffeinate"])
    for _ in range(2):
        wakefulness.look(has_jobs=True)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the Mac may go to sleep while jobs run"
    ]


def test_on_a_mac_the_child_ends_with_the_worker_and_elsewhere_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(wakefulness, "CAFFEINATE", tmp_path)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert keep_awake_command() == (str(tmp_path), "-i", "-w", str(os.getpid()))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert keep_awake_command() is None


def test_the_fetcher_holds_it_while_a_job_runs_and_lets_go_when_it_leaves(monkeypatch, tmp_path):
    program, held = tmp_path / "caffeinate", tmp_path / "held"
    program.write_text(f"#!/bin/sh\necho $$ > {held}.part; mv {held}.part {held}; exec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(wakefulness, "CAFFEINATE", program)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    queue, loader = InMemoryQueue(), NotedLoader()
    queue.enqueue(agent_id="a")
    fetcher = fetcher_of(queue, loader, leaving=Leaving(burst=True), poll_s=0.001)
    job = loader.jobs.get(timeout=TIMEOUT_S)
    wait_for(held.exists)
    pid = int(held.read_text())
    os.kill(pid, 0)
    job.claimed.finish({})
    job.claimed.release()
    fetcher.join(TIMEOUT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
