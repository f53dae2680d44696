"""Canceled ids go with their hashes; a deferred job whose dependencies have all ended is enqueued."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq.job import Dependency
from tests.worker.queue.ends import finish
from tests.worker.queue.looking import places

from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.queue.end import FollowUp
from stoker_worker.queue.housekeeping import DeferredJobs

pytestmark = pytest.mark.server

KEY = "rq:canceled:generate"


def steps(queue, count=20):
    for _ in range(count):
        queue._housekeeping._search.make_due()
        queue._housekeeping._sweep.make_due()
        queue.tidy()


def test_ids_of_canceled_jobs_go_with_their_hashes(connection, producer, queue):
    tickets = [producer.submit(prompt="x") for _ in range(4)]
    assert all(ticket.cancel() for ticket in tickets)
    expired, deleted, *kept = (ticket.job_id for ticket in tickets)
    connection.pexpire(f"rq:job:{expired}", 1)
    connection.delete(f"rq:job:{deleted}")
    connection.zadd(KEY, {b"\xff": 1})
    while connection.exists(f"rq:job:{expired}"):
        pass
    steps(queue, 1)
    assert connection.zcard(KEY) == len(kept)
    assert all(connection.zscore(KEY, job_id) for job_id in kept)


def test_many_are_looked_through_in_pages(connection, queue):
    connection.zadd(KEY, {f"a{n}": n for n in range(1200)})
    for n in range(0, 1200, 7):
        connection.hset(f"rq:job:a{n}", "status", "canceled")
    steps(queue, 3)
    assert connection.zrange(KEY, 0, -1) == [f"a{n}".encode() for n in range(0, 1200, 7)]


@pytest.mark.parametrize("name", ["canceled", "deferred", "scheduled"])
def test_a_registry_of_another_type_stops_nothing_else(connection, producer, queue, name):
    """Any producer can write one, before there is a job in it."""
    connection.rpush(f"rq:{name}:generate", "x")
    job_id = producer.submit(prompt="x").job_id
    if name != "canceled":
        connection.zadd(KEY, {"gone": 1})
    steps(queue, 3)
    [job] = queue.claim(8, Busy())
    finish(job, {"text": "y"})
    assert connection.zscore("rq:finished:generate", job_id)
    assert name == "canceled" or not connection.exists(KEY)


def test_a_deferred_job_with_dependencies_of_any_form_holds_up_no_other(connection, producer, queue):
    for number, value in enumerate([b"[" * 50_000, b'["\\ud800"]', b"5", b"[[5]]", b"{}", b"\xff", b'"a b"']):
        connection.hset(f"rq:job:bad-{number}", mapping={"status": "deferred", "dependency_ids": value, "data": "x"})
        connection.zadd("rq:deferred:generate", {f"bad-{number}": 1})
    connection.zadd(KEY, {"gone": 1})
    steps(queue, 3)
    assert connection.zcard("rq:deferred:generate") == 7
    assert not connection.exists(KEY)


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
