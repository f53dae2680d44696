"""A job that is in no list is found and put back, and no other job is touched."""

import uuid
from datetime import timedelta

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail, finish
from tests.worker.queue.looking import places, taken_over

from stoker_shared.errors import EngineFailed
from stoker_shared.wire import TASK_PATH
from stoker_worker.periodic import Periodic
from stoker_worker.ports import Busy
from stoker_worker.queue.recover import LostJobs

pytestmark = pytest.mark.server

REQUEST = {"agent_id": "a", "prompt": "x"}


@pytest.fixture
def audit(connection, queue):
    return LostJobs(connection, lambda: ["generate"], queue._lease, wait_s=0, every_s=0)


def enqueue(plain, **options):
    return plain.enqueue(TASK_PATH, request=REQUEST, **options).id


def rounds(audit, in_flight=(), count=2, steps=8):
    """Run some whole searches: with so few keys, one takes at most five steps."""
    return sum(audit.step(in_flight) for _ in range(count * steps))


def lose(connection, job_id, **fields):
    connection.lrem("rq:queue:generate", 0, job_id)
    connection.zrem("rq:wip:generate", *connection.zrange("rq:wip:generate", 0, -1) or ["-"])
    if fields:
        connection.hset(f"rq:job:{job_id}", mapping=fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"status": "started", "worker_name": "a-stock-worker-that-is-gone"},
        {"status": "started", "worker_name": "stoker-dead-1"},
        {"status": "started", "worker_name": ""},
    ],
    ids=["popped", "stock worker gone", "stoker worker gone", "nobody's"],
)
def test_a_job_in_no_list_is_put_back_once_and_at_the_front(connection, plain, queue, audit, fields):
    lost, waiting = enqueue(plain), enqueue(plain)
    lose(connection, lost, **fields)
    assert rounds(audit) == 1
    assert [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)] == [lost, waiting]
    assert rounds(audit) == 0
    assert [job.job_id for job in queue.claim(8, Busy())] == [lost]


def test_the_first_search_only_records_jobs_that_seem_lost(connection, plain, queue, audit):
    job_id = enqueue(plain)
    lose(connection, job_id)
    assert rounds(audit, count=1, steps=1) == 0
    assert places(connection, job_id) == []


def test_a_job_that_moved_between_two_searches_is_not_put_back(connection, plain, queue, audit):
    job_id = enqueue(plain)
    lose(connection, job_id)
    for n in range(16):
        connection.hset(f"rq:job:{job_id}", "enqueued_at", f"2026-01-01T00:00:{n:02}.000000Z")
        assert audit.step(()) == 0


def test_a_job_is_put_back_only_after_it_seemed_lost_for_a_while(connection, plain, queue):
    job_id = enqueue(plain)
    lose(connection, job_id)
    assert rounds(LostJobs(connection, lambda: ["generate"], queue._lease, wait_s=3600, every_s=0)) == 0


def test_lost_jobs_are_looked_for_at_the_start_and_then_rarely(connection, plain, queue):
    first, later = enqueue(plain), enqueue(plain)
    audit = LostJobs(connection, lambda: ["generate"], queue._lease, wait_s=0, every_s=3600)
    lose(connection, first)
    assert rounds(audit) == 1
    lose(connection, later)
    assert rounds(audit) == 0


def test_a_search_interrupted_by_an_error_starts_over(connection, plain, queue, audit, monkeypatch):
    job_id = enqueue(plain)
    lose(connection, job_id)
    monkeypatch.setattr(connection, "scan", raise_gone)
    with pytest.raises(RedisConnectionError):
        audit.step(())
    monkeypatch.undo()
    assert rounds(audit) == 1


def raise_gone(*args, **words):
    raise RedisConnectionError("gone")


def test_jobs_in_their_right_place_stay_there(connection, plain, queue, audit):
    ended = {"finished": enqueue(plain), "failed": enqueue(plain), "scheduled": enqueue(plain, retry=Retry(1, 60))}
    for end, job_id in ended.items():
        (job,) = queue.claim(1, Busy())
        assert job.job_id == job_id
        finish(job, {}) if end == "finished" else fail(job, EngineFailed("x"))
    later = plain.enqueue_in(timedelta(hours=1), TASK_PATH, request=REQUEST).id
    running, waiting = enqueue(plain), enqueue(plain)
    queue.claim(1, Busy())
    deferred = enqueue(plain, depends_on=waiting)
    where = ended | {"scheduled again": later, "wip": running, "generate": waiting, "deferred": deferred}
    assert rounds(audit) == 0
    assert {name: places(connection, job_id) for name, job_id in where.items()} == {
        name: [name.removesuffix(" again")] for name in where
    }


@pytest.mark.parametrize("status", ["queued", "started"])
@pytest.mark.parametrize("place", ["scheduled", "deferred", "ready", "intermediate", "wip"])
def test_a_job_that_is_in_any_list_is_not_lost(connection, plain, queue, audit, place, status):
    job_id = enqueue(plain)
    lose(connection, job_id, status=status)
    if place == "intermediate":
        connection.rpush("rq:queue:generate:intermediate", job_id)
    else:
        member = f"{job_id}:{uuid.uuid4().hex}" if place == "wip" else job_id
        connection.zadd(f"rq:{place}:generate", {member: 9e9})
    assert rounds(audit) == 0


def test_a_job_this_worker_runs_is_not_lost_when_an_old_tool_removes_its_entry(connection, plain, queue, audit):
    job_id = enqueue(plain)
    queue.claim(1, Busy())
    lose(connection, job_id)
    assert rounds(audit, in_flight={job_id}) == 0
    assert rounds(audit, in_flight=()) == 1


def test_a_job_of_a_live_stock_worker_is_not_touched(connection, plain, queue, audit):
    job_id = enqueue(plain)
    lose(connection, job_id, status="started", worker_name="stock")
    connection.hset("rq:worker:stock", "state", "busy")
    assert rounds(audit) == 0
    connection.delete("rq:worker:stock")
    assert rounds(audit) == 1


def test_jobs_of_other_queues_and_odd_keys_are_not_touched(connection, plain, queue, audit):
    connection.hset("rq:job:other", mapping={"status": "queued", "origin": "other", "data": "x"})
    connection.hset("rq:job:no-origin", mapping={"status": "queued"})
    connection.set("rq:job:text", "x")
    connection.hset(b"rq:job:\xff", mapping={"status": "queued", "origin": "generate"})
    connection.hset("rq:job:a b", mapping={"status": "queued", "origin": "generate"})
    assert rounds(audit) == 0


def test_a_deposed_worker_puts_nothing_back(connection, plain, queue, audit):
    job_id = enqueue(plain)
    lose(connection, job_id)
    taken_over(connection)
    assert rounds(audit) == 0


@pytest.mark.slow
def test_one_lost_job_among_thousands_is_found(connection, plain, producer, queue, audit):
    tickets = producer.submit_many([{"agent_id": f"a{n}", "prompt": "x"} for n in range(3000)])
    lose(connection, tickets[1234].job_id)
    assert rounds(audit, steps=200) == 1
    assert connection.lindex("rq:queue:generate", 0).decode() == tickets[1234].job_id
    assert Job.fetch(tickets[1234].job_id, connection, JSONSerializer).get_status() == "queued"


def test_the_workers_housekeeping_searches_for_lost_jobs(connection, plain, queue):
    queue._housekeeping._lost._wait_s = 0
    queue._housekeeping._search = Periodic(0.0)
    job_id = enqueue(plain)
    lose(connection, job_id)
    for _ in range(16):
        queue.tidy()
    assert places(connection, job_id) == ["generate"]
