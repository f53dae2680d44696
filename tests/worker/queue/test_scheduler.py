"""Scheduled jobs are enqueued once, when they are due, even if other schedulers run too."""

from datetime import timedelta
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, Retry
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail
from tests.worker.queue.looking import places, taken_over

from stoker_shared.errors import EngineFailed, RedisUnavailable
from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

LOCK = "rq:scheduler-lock:generate"
REQUEST = {"agent_id": "a", "prompt": "x"}


@pytest.fixture(autouse=True)
def long_steps(monkeypatch):
    """Let one step enqueue all due jobs, on a busy machine too."""
    monkeypatch.setattr("stoker_worker.queue.housekeeping._STEP_S", 10)


def later(plain, **options):
    return plain.enqueue_in(timedelta(hours=1), TASK_PATH, request=REQUEST, **options).id


def make_due(connection, *job_ids):
    for due_at, job_id in enumerate(job_ids, start=1):
        connection.zadd("rq:scheduled:generate", {job_id: due_at})


@pytest.fixture
def due(connection, plain):
    """A scheduled job that is due."""
    job_id = later(plain)
    make_due(connection, job_id)
    return job_id


def waiting(connection):
    return [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)]


def stock_scheduler(connection):
    return RQScheduler(["generate"], connection, serializer=JSONSerializer)


def test_due_jobs_are_enqueued_once_in_the_order_of_their_times_and_the_rest_waits(connection, plain, queue):
    first, second, third = (later(plain) for _ in range(3))
    make_due(connection, second, first)
    queue.tidy()
    queue.tidy()
    assert waiting(connection) == [second, first]
    assert places(connection, third) == ["scheduled"]
    assert Job.fetch(first, connection, JSONSerializer).get_status() == "queued"


def test_thousands_of_due_jobs_are_enqueued_in_steps_without_a_pause(connection, plain, queue, monkeypatch):
    """Each step is short, because its thread also watches the running jobs, and the next step follows at once."""
    monkeypatch.setattr("stoker_worker.queue.housekeeping._STEP_S", 0)
    ids = [f"job-{n}" for n in range(1000)]
    with connection.pipeline() as pipeline:
        for n, job_id in enumerate(ids):
            job = plain.create_job(TASK_PATH, kwargs={"request": REQUEST}, job_id=job_id, status="scheduled")
            job.save(pipeline=pipeline)
            pipeline.zadd("rq:scheduled:generate", {job_id: n + 1})
        pipeline.execute()
    lengths = [0]
    while queue.tidy():
        lengths.append(connection.llen("rq:queue:generate"))
    assert waiting(connection) == ids
    assert max(after - before for before, after in pairwise(lengths)) <= 200
    assert not connection.zcard("rq:scheduled:generate")


@pytest.mark.parametrize(("at_front", "order"), [(True, ["retried", "other"]), (False, ["other", "retried"])])
def test_a_retry_goes_to_the_front_if_its_producer_asked_for_it(connection, plain, queue, at_front, order):
    retry = Retry(max=1, interval=60, enqueue_at_front=at_front)
    plain.enqueue(TASK_PATH, request=REQUEST, retry=retry, job_id="retried")
    (job,) = queue.claim(8, Busy())
    fail(job, EngineFailed("may pass"))
    plain.enqueue(TASK_PATH, request=REQUEST, job_id="other")
    make_due(connection, "retried")
    queue.tidy()
    assert waiting(connection) == order


def test_a_stock_scheduler_that_holds_the_lock_keeps_it_and_is_replaced_when_it_is_gone(connection, plain, queue):
    stock = stock_scheduler(connection)
    assert stock.acquire_locks() == {"generate"}
    job_id = later(plain)
    make_due(connection, job_id)
    queue.tidy()
    assert places(connection, job_id) == ["scheduled"]
    stock.release_locks()
    queue.tidy()
    assert places(connection, job_id) == ["generate"]
    stock.connection.close()


def test_a_stock_scheduler_beside_us_enqueues_nothing_twice(connection, plain, queue):
    stock = stock_scheduler(connection)
    queue.tidy()
    assert stock.acquire_locks() == set()
    job_id = later(plain)
    make_due(connection, job_id)
    stock.enqueue_scheduled_jobs()
    queue.tidy()
    stock.enqueue_scheduled_jobs()
    assert waiting(connection) == [job_id]
    stock.connection.close()


def test_our_own_lock_is_released_at_the_end(redis_url, connection, due):
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as opened:
        opened.rq_queue.tidy()
        assert waiting(connection) == [due]
        assert connection.get(LOCK) == opened.registration.name.encode()
    assert not connection.exists(LOCK)


def test_a_deposed_worker_enqueues_nothing(connection, due, queue):
    taken_over(connection)
    queue.tidy()
    assert places(connection, due) == ["scheduled"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_withdrawn_just_before_it_is_enqueued_stays_withdrawn(connection, due, queue, monkeypatch, how):
    real = queue._housekeeping.scheduler._enqueue

    def withdraw_first(**words):
        getattr(Job.fetch(due, connection, JSONSerializer), how)()
        return real(**words)

    monkeypatch.setattr(queue._housekeeping.scheduler, "_enqueue", withdraw_first)
    queue.tidy()
    assert places(connection, due) == (["canceled"] if how == "cancel" else [])


def test_an_unreadable_job_is_enqueued_to_be_refused_and_holds_up_no_other(connection, plain, queue):
    good = later(plain)
    connection.hset("rq:job:bad", mapping={"data": "x", "timeout": "soon", "status": "scheduled"})
    connection.hset("rq:job:worse", mapping={"data": "x", "timeout": "soon", "rate_limit_key": "k"})
    connection.set("rq:job:text", "not a hash")
    make_due(connection, "bad", "worse", "text", "gone", good)
    connection.zadd("rq:scheduled:generate", {b"\xff": 1})
    queue.tidy()
    assert sorted(waiting(connection)) == sorted(["bad", "worse", good])
    assert not connection.zcard("rq:scheduled:generate")


def test_a_retry_that_could_not_be_written_is_counted_once(connection, plain, queue, monkeypatch):
    job_id = plain.enqueue(TASK_PATH, request=REQUEST, retry=Retry(max=1, interval=60)).id
    (job,) = queue.claim(8, Busy())
    monkeypatch.setattr(Queue, "schedule_job", MagicMock(side_effect=RedisConnectionError))
    with pytest.raises(RedisUnavailable):
        fail(job, EngineFailed("may pass"))
    monkeypatch.undo()
    fail(job, EngineFailed("may pass"))
    assert places(connection, job_id) == ["scheduled"]
