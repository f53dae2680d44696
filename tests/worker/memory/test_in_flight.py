"""The lock that keeps two processes from working on one agent. Real processes: the kernel keeps the locks."""

import threading
from functools import partial
from pathlib import Path

import pytest
from tests.worker.memory.agents import AgentOf, ask, ids, open_store
from tests.worker.memory.in_flight_process import another_process_working_on, is_busy_for_others

from stoker_shared.errors import AgentBusy
from stoker_worker.memory import store as store_module
from stoker_worker.memory.locks import InFlight, working_on
from stoker_worker.ports import Delivery

pytestmark = pytest.mark.slow

NOBODY: frozenset[str] = frozenset()


def test_one_process_at_a_time_works_on_an_agent_until_it_ends_or_dies(tmp_path: Path) -> None:
    with another_process_working_on(tmp_path, "a") as other:
        with pytest.raises(AgentBusy, match="another process is working on agent 'a'"), working_on(tmp_path, "a"):
            pass
        with working_on(tmp_path, "b"):
            assert is_busy_for_others(tmp_path, "b")
        assert not is_busy_for_others(tmp_path, "b")
        other.kill()
        with working_on(tmp_path, "a", wait=True):
            assert is_busy_for_others(tmp_path, "a")


def test_pinned_agents_are_the_workers_until_they_leave(tmp_path: Path) -> None:
    worker = InFlight(tmp_path, wait_s=0.1)
    worker.pin(frozenset({"a", "b"}))
    assert (is_busy_for_others(tmp_path, "a"), is_busy_for_others(tmp_path, "b")) == (True, True)
    worker.pin(frozenset({"b"}))
    assert (is_busy_for_others(tmp_path, "a"), is_busy_for_others(tmp_path, "b")) == (False, True)
    with worker.working_on("b"), worker.working_on("a"):
        assert is_busy_for_others(tmp_path, "a")
    assert (is_busy_for_others(tmp_path, "a"), is_busy_for_others(tmp_path, "b")) == (False, True)
    worker.close()
    assert not is_busy_for_others(tmp_path, "b")


def test_a_pin_waits_for_nobody_and_the_job_waits_for_its_agent(tmp_path: Path) -> None:
    worker = InFlight(tmp_path, wait_s=0.1)
    with another_process_working_on(tmp_path, "a") as other:
        worker.pin(frozenset({"a", "b"}))
        worker.wait_for("b")
        worker.wait_for("not pinned")
        with pytest.raises(AgentBusy):
            worker.wait_for("a")
        patient = InFlight(tmp_path, wait_s=30)
        worker.close()
        patient.pin(frozenset({"a"}))
        waiting = threading.Thread(target=patient.wait_for, args=("a",))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        other.kill()
        waiting.join(30)
    assert is_busy_for_others(tmp_path, "a")
    patient.close()


def test_two_owners_in_one_process_respect_each_other_and_neither_ends_the_others_locks(tmp_path: Path) -> None:
    worker = InFlight(tmp_path, wait_s=0.1)
    worker.pin(frozenset({"a"}))
    with pytest.raises(AgentBusy), working_on(tmp_path, "a"):
        pass
    with working_on(tmp_path, "b"):
        pass
    assert is_busy_for_others(tmp_path, "a")
    assert not is_busy_for_others(tmp_path, "b")
    worker.close()


def test_a_store_reads_no_agent_that_a_command_is_changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "InFlight", partial(InFlight, wait_s=0.1))
    store = open_store(tmp_path)
    AgentOf(store, "a").say(ids(10))
    AgentOf(store, "b").say(ids(10))
    delivery = Delivery("job", "2026-01-01T00:00:00Z")
    with another_process_working_on(tmp_path, "a"):
        store.pin(frozenset({"a", "b"}), NOBODY)
        for read in (lambda: store.open_agent("a"), lambda: store.answer("a", delivery)):
            with pytest.raises(AgentBusy):
                read()
        assert store.open_agent("b").number == 1
        for request in (ask("forget", "a"), ask("fork", "b", target="a")):
            with pytest.raises(AgentBusy):
                store.agent_jobs.run(request, delivery)
    assert store.open_agent("a").number == 1
    assert is_busy_for_others(tmp_path, "a")
    store.close()
    assert not is_busy_for_others(tmp_path, "a")
