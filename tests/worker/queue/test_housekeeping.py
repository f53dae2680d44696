"""Cleaning that RQ does not do, or does otherwise."""

import time

import pytest
from rq import Queue, RateLimit
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import finish

from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server

KEY = "rq:canceled:generate"


def step(queue):
    queue._housekeeping._clean.make_due()
    queue.tidy()


def test_ids_of_canceled_jobs_go_after_a_month(connection, producer, queue):
    ticket = producer.submit(prompt="x")
    assert ticket.cancel()
    connection.zadd(KEY, {"old": time.time() - 31 * 86_400})
    step(queue)
    assert connection.zrange(KEY, 0, -1) == [ticket.job_id.encode()]


@pytest.mark.parametrize("name", ["canceled", "scheduled"])
def test_a_registry_of_another_type_stops_nothing_else(connection, producer, queue, name):
    """Any producer can write one, before there is a job in it."""
    connection.rpush(f"rq:{name}:generate", "x")
    job_id = producer.submit(prompt="x").job_id
    if name != "canceled":
        connection.zadd(KEY, {"gone": 1})
    step(queue)
    [job] = queue.claim(8, Busy())
    finish(job, {"text": "y"})
    assert connection.zscore("rq:finished:generate", job_id)
    assert name == "canceled" or not connection.exists(KEY)


def test_jobs_that_a_dead_worker_of_rqs_own_had_made_ready_are_enqueued_after_a_minute(connection, plain, queue):
    left, canceled, new = (plain.enqueue(TASK_PATH, request={"prompt": "x"}).id for _ in range(3))
    connection.delete("rq:queue:generate")
    connection.zadd("rq:ready:generate", {b"\xff": 1, "a.b": 1})
    for job_id, status, age_s in (
        (left, "ready_to_enqueue", 90),
        (canceled, "canceled", 90),
        (new, "ready_to_enqueue", 9),
    ):
        connection.hset(f"rq:job:{job_id}", "status", status)
        connection.zadd("rq:ready:generate", {job_id: time.time() - age_s})
    step(queue)
    assert connection.lrange("rq:queue:generate", 0, -1) == [left.encode()]
    assert connection.hget(f"rq:job:{left}", "status") == b"queued"
    assert connection.zrange("rq:ready:generate", 0, -1) == [new.encode()]


def test_a_dependent_with_a_rate_limit_is_left_to_the_workers_that_keep_it(connection, plain, queue):
    parent = plain.enqueue(TASK_PATH, request={"prompt": "x"})
    reports = Queue("reports", connection=connection, serializer=JSONSerializer)
    limited = reports.enqueue("os.getcwd", depends_on=parent, rate_limit=RateLimit("key", 1))
    [job] = queue.claim(8, Busy())
    finish(job, {"text": "y"})
    assert reports.ready_job_registry.get_job_ids(cleanup=False) == [limited.id]
    reports.ready_job_registry.cleanup()
    assert connection.lrange("rq:queue:reports", 0, -1) == [limited.id.encode()]
