"""Canceled ids go with their hashes."""

import time

import pytest
from rq import Queue, RateLimit
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import finish

from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server

KEY = "rq:canceled:generate"


def steps(queue, count=20):
    for _ in range(count):
        queue._housekeeping._forget.make_due()
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


def test_many_are_looked_through_some_at_a_time(connection, queue):
    connection.zadd(KEY, {f"a{n}": n for n in range(1200)})
    for n in range(0, 1200, 7):
        connection.hset(f"rq:job:a{n}", "status", "canceled")
    left = [f"a{n}".encode() for n in range(0, 1200, 7)]
    steps(queue, 1)
    assert connection.zcard(KEY) > len(left)
    steps(queue, 50)
    assert connection.zrange(KEY, 0, -1) == left


@pytest.mark.parametrize("name", ["canceled", "scheduled"])
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


def test_jobs_that_a_dead_worker_of_rqs_own_had_made_ready_are_enqueued(connection, plain, queue):
    left, canceled = (plain.enqueue(TASK_PATH, request={"prompt": "x"}).id for _ in range(2))
    connection.delete("rq:queue:generate")
    for job_id, status in ((left, "ready_to_enqueue"), (canceled, "canceled")):
        connection.hset(f"rq:job:{job_id}", "status", status)
        connection.zadd("rq:ready:generate", {job_id: time.time()})
    queue._housekeeping._clean.make_due()
    queue.tidy()
    assert connection.lrange("rq:queue:generate", 0, -1) == [left.encode()]
    assert connection.hget(f"rq:job:{left}", "status") == b"queued"
    assert not connection.exists("rq:ready:generate")


def test_a_dependent_with_a_rate_limit_is_left_to_the_workers_that_keep_it(connection, plain, queue):
    parent = plain.enqueue(TASK_PATH, request={"prompt": "x"})
    reports = Queue("reports", connection=connection, serializer=JSONSerializer)
    limited = reports.enqueue("os.getcwd", depends_on=parent, rate_limit=RateLimit("key", 1))
    [job] = queue.claim(8, Busy())
    finish(job, {"text": "y"})
    assert reports.ready_job_registry.get_job_ids(cleanup=False) == [limited.id]
    reports.ready_job_registry.cleanup()
    assert connection.lrange("rq:queue:reports", 0, -1) == [limited.id.encode()]
