"""Which version an agent's entry names once a job has ended."""

import pytest

from stoker_shared.agent_request import build_agent_request
from stoker_shared.request import build_request
from stoker_worker.ports import MemoryUse
from stoker_worker.queue.keeping import Keeping
from stoker_worker.queue.waiting_job import Granted

GRANTED = Granted("j", MemoryUse("write", "a"), "here", version=7)


def keeping(store="here", **fields):
    build = build_agent_request if "action" in fields else build_request
    request = build({"agent_id": "a", **({} if "action" in fields else {"prompt": "p"}), **fields})
    return Keeping.of(request, GRANTED, store)


def turn(version, saved=True):
    return {"cache": {"agent_version": version, "saved": saved}}


@pytest.mark.parametrize(
    ("fields", "result", "version"),
    [
        ({}, turn(8), 8),
        ({}, turn(5), 7),  # an answer that is given again
        ({}, turn(7, saved=False), 8),  # nobody has the turn that was answered, and nobody goes on without it
        ({}, turn(None, saved=False), 8),
        ({"action": "rollback"}, {"version": 9, "from_version": 8}, 9),
        ({"action": "fork", "target": "b"}, {"version": 1, "from_version": 8}, 1),
        ({"action": "forget"}, {"version": 8, "existed": True}, 9),
        ({"action": "forget"}, {"version": 0, "existed": False}, 7),
        ({}, {}, 7),
    ],
)
def test_the_entry_names_the_newest_version(fields, result, version):
    assert keeping(**fields).version_after(result) == version


def test_a_job_that_writes_nothing_changes_no_entry():
    assert keeping(cache="read") is keeping(cache="off") is keeping(action="info") is None


def test_the_agent_that_a_fork_makes_is_the_one_that_changes():
    assert keeping(action="fork", target="b") == Keeping("b")


def test_an_entry_that_names_this_store_is_known():
    assert (keeping().is_here, keeping("elsewhere").is_here) == (True, False)
