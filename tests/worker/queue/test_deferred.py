"""A deferred job whose dependencies have all ended is enqueued, and no other job is touched."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq.job import Dependency
from tests.worker.queue.looking import places

from stoker_shared.wire import TASK_PATH
from stoker_worker.queue.end import FollowUp
from stoker_worker.queue.housekeeping import DeferredJobs

pytestmark = pytest.mark.server


def enqueue(plain, **options):
    return plain.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": "x"}, **options).id


@pytest.fixture
def left_behind(connection, plain):
    """Jobs left deferred, as by a worker of RQ's own that was lost just after a failure."""

    def leave(count):
        failed = [enqueue(plain) for _ in range(count)]
        waiting = [enqueue(plain, depends_on=Dependency(jobs=[job_id], allow_failure=True)) for job_id in failed]
        connection.delete("rq:queue:generate")
        for job_id in failed:
            connection.hset(f"rq:job:{job_id}", "status", "failed")
        return waiting

    return leave


def test_a_deferred_job_left_behind_by_its_failed_dependency_is_enqueued(connection, plain, queue):
    """A worker of RQ's own that is lost just after the failure leaves such a job."""
    failed, finished, waiting, another = (enqueue(plain) for _ in range(4))
    allows = enqueue(plain, depends_on=Dependency(jobs=[failed, finished], allow_failure=True))
    others = [
        enqueue(plain, depends_on=failed),
        enqueue(plain, depends_on=Dependency(jobs=[failed, waiting], allow_failure=True)),
    ]
    deleted = enqueue(plain)
    others.append(enqueue(plain, depends_on=Dependency(jobs=[another, deleted], allow_failure=True)))
    connection.delete(f"rq:job:{deleted}")
    connection.lrem("rq:queue:generate", 1, deleted)
    connection.hset(f"rq:job:{others[0]}", "dependency_ids", "no JSON")
    for job_id, status in ((failed, "failed"), (finished, "finished"), (another, "failed")):
        connection.lrem("rq:queue:generate", 1, job_id)
        connection.hset(f"rq:job:{job_id}", "status", status)
    queue.tidy()
    assert places(connection, allows) == ["generate"]
    assert connection.hget(f"rq:job:{allows}", "status") == b"queued"
    assert [places(connection, job_id) for job_id in others] == [["deferred"]] * 3
    queue.tidy()
    assert places(connection, allows) == ["generate"]


@pytest.mark.slow
def test_every_deferred_job_is_checked_although_enqueued_ones_leave_gaps(connection, plain, left_behind):
    waiting = left_behind(250)
    deferred = DeferredJobs(connection, lambda: ["generate"], FollowUp(connection))
    for _ in range(3):
        deferred.step()
    assert sorted(plain.get_job_ids()) == sorted(waiting)


def test_a_job_missed_because_of_an_error_is_enqueued_at_the_next_step(connection, left_behind, monkeypatch):
    (waiting,) = left_behind(1)
    follow_up = FollowUp(connection)
    deferred = DeferredJobs(connection, lambda: ["generate"], follow_up)
    monkeypatch.setattr(follow_up, "set_free", raise_gone)
    with pytest.raises(RedisConnectionError):
        deferred.step()
    monkeypatch.undo()
    deferred.step()
    assert places(connection, waiting) == ["generate"]


def raise_gone(*args):
    raise RedisConnectionError("gone")
