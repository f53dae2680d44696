"""Scheduled jobs are enqueued when they are due, once, whoever schedules beside us."""

from datetime import timedelta
from itertools import pairwise

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, RateLimit, Repeat, Retry
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from tests.worker.rq_worker.looking import places, taken_over

from stoker_shared.errors import EngineFailed
from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.rq_worker.connect import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

LOCK = "rq:scheduler-lock:generate"
REQUEST = {"agent_id": "a", "prompt": "x"}


def later(plain, **options):
    return plain.enqueue_in(timedelta(hours=1), TASK_PATH, request=REQUEST, **options).id


def make_due(connection, *job_ids):
    for due_at, job_id in enumerate(job_ids, start=1):
        connection.zadd("rq:scheduled:generate", {job_id: due_at})


def waiting(connection):
    return [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)]


def stock_scheduler(connection):
    return RQScheduler(["generate"], connection, serializer=JSONSerializer)


def test_what_is_due_is_enqueued_once_in_the_order_of_its_times_and_the_rest_waits(connection, plain, queue):
    first, second, third = (later(plain) for _ in range(3))
    make_due(connection, second, first)
    queue.tidy()
    queue.tidy()
    assert waiting(connection) == [second, first]
    assert places(connection, third) == ["scheduled"]
    assert Job.fetch(first, connection, JSONSerializer).get_status() == "queued"


@pytest.mark.parametrize("n_limited", [0, 3])
def test_thousands_that_are_due_at_once_are_enqueued_in_steps_one_right_after_the_other(
    connection, plain, queue, monkeypatch, n_limited
):
    """Each step is short, for running jobs are watched on the same thread, and none waits for the next second."""
    monkeypatch.setattr("stoker_worker.rq_worker.scheduler._STEP_S", 0)
    ids = [f"job-{n}" for n in range(1000)]
    with connection.pipeline() as pipeline:
        for n, job_id in enumerate(ids):
            job = plain.create_job(TASK_PATH, kwargs={"request": REQUEST}, job_id=job_id, status="scheduled")
            if n < n_limited:
                job.rate_limit_key, job.rate_limit_concurrency = "key", 1000
            job.save(pipeline=pipeline)
            pipeline.zadd("rq:scheduled:generate", {job_id: n + 1})
        pipeline.execute()
    lengths = [0]
    while queue.tidy():
        lengths.append(connection.llen("rq:queue:generate"))
    assert sorted(waiting(connection)) == sorted(ids)
    assert [job_id for job_id in waiting(connection) if job_id in ids[n_limited:]] == ids[n_limited:]
    assert max(after - before for before, after in pairwise(lengths)) <= 200
    assert not connection.zcard("rq:scheduled:generate")


def test_a_retry_with_an_interval_waits_in_the_scheduled_registry_and_comes_back(connection, plain, queue):
    job_id = plain.enqueue(TASK_PATH, request=REQUEST, retry=Retry(max=1, interval=60)).id
    (job,) = queue.claim(8, Busy())
    queue.fail(job, EngineFailed("may pass"))
    assert places(connection, job_id) == ["scheduled"]
    make_due(connection, job_id)
    queue.tidy()
    (job,) = queue.claim(8, Busy())
    queue.fail(job, EngineFailed("did not pass"))
    assert places(connection, job_id) == ["failed"]


@pytest.mark.parametrize(("at_front", "order"), [(True, ["retried", "other"]), (False, ["other", "retried"])])
def test_a_retry_goes_to_the_front_if_its_producer_said_so(connection, plain, queue, at_front, order):
    retry = Retry(max=1, interval=60, enqueue_at_front=at_front)
    plain.enqueue(TASK_PATH, request=REQUEST, retry=retry, job_id="retried")
    (job,) = queue.claim(8, Busy())
    queue.fail(job, EngineFailed("may pass"))
    plain.enqueue(TASK_PATH, request=REQUEST, job_id="other")
    make_due(connection, "retried")
    queue.tidy()
    assert waiting(connection) == order


def test_a_stock_scheduler_that_holds_the_lock_is_left_to_it_and_followed_when_it_is_gone(connection, plain, queue):
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


def test_a_dead_workers_scheduler_lock_is_not_waited_out_and_our_own_is_given_up_at_the_end(
    redis_url, connection, plain
):
    connection.set(LOCK, "stoker-dead-host-1", ex=60)
    job_id = later(plain)
    make_due(connection, job_id)
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as opened:
        opened.rq_queue.tidy()
        assert waiting(connection) == [job_id]
        assert connection.get(LOCK) == opened.identity.name.encode()
        assert connection.exists(f"rq:scheduler:{opened.identity.name}")
    assert not connection.exists(LOCK, f"rq:scheduler:{opened.identity.name}")


def test_a_deposed_worker_enqueues_nothing(connection, plain, queue):
    job_id = later(plain)
    make_due(connection, job_id)
    taken_over(connection)
    queue.tidy()
    assert places(connection, job_id) == ["scheduled"]


@pytest.mark.parametrize("limit", [None, RateLimit("key", 2)])
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_withdrawn_just_before_it_is_enqueued_stays_withdrawn(connection, plain, queue, monkeypatch, how, limit):
    job_id = later(plain, rate_limit=limit)
    make_due(connection, job_id)
    real = queue._housekeeping.scheduler._guards

    def withdraw_first(name):
        if places(connection, job_id) == ["scheduled"]:
            getattr(Job.fetch(job_id, connection, JSONSerializer), how)()
        return real(name)

    monkeypatch.setattr(queue._housekeeping.scheduler, "_guards", withdraw_first)
    queue.tidy()
    assert places(connection, job_id) == (["canceled"] if how == "cancel" else [])


def test_a_rate_limited_job_waits_for_its_slot_when_it_is_due(connection, plain, queue):
    first, second = (later(plain, rate_limit=RateLimit("key", 1)) for _ in range(2))
    make_due(connection, first, second)
    queue.tidy()
    assert waiting(connection) == [first]
    (job,) = queue.claim(8, Busy())
    queue.finish(job, {"text": "done"})
    assert waiting(connection) == [second]


def test_a_job_nobody_can_read_is_enqueued_to_be_refused_and_holds_up_nothing(connection, plain, queue):
    good = later(plain)
    connection.hset("rq:job:bad", mapping={"data": "x", "timeout": "soon", "status": "scheduled"})
    connection.hset("rq:job:worse", mapping={"data": "x", "timeout": "soon", "rate_limit_key": "k"})
    connection.set("rq:job:text", "not a hash")
    make_due(connection, "bad", "worse", "text", "gone", good)
    connection.zadd("rq:scheduled:generate", {b"\xff": 1})
    queue.tidy()
    assert sorted(waiting(connection)) == sorted(["bad", "worse", good])
    assert not connection.zcard("rq:scheduled:generate")


def test_a_worker_that_dies_while_it_schedules_a_retry_leaves_the_job_to_recovery(
    redis_url, connection, plain, monkeypatch
):
    job_id = plain.enqueue(TASK_PATH, request=REQUEST, retry=Retry(max=1, interval=60)).id
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as dying:
        (job,) = dying.rq_queue.claim(8, Busy())
        monkeypatch.setattr(Queue, "schedule_job", _gone)
        with pytest.raises(RedisConnectionError):
            dying.rq_queue.fail(job, EngineFailed("may pass"))
        monkeypatch.undo()
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as next_one:
        assert next_one.rq_queue.recover() == 1
    assert places(connection, job_id) == ["generate"]


def test_a_retry_that_could_not_be_written_is_counted_once(connection, plain, queue, monkeypatch):
    job_id = plain.enqueue(TASK_PATH, request=REQUEST, retry=Retry(max=1, interval=60)).id
    (job,) = queue.claim(8, Busy())
    monkeypatch.setattr(Queue, "schedule_job", _gone)
    with pytest.raises(RedisConnectionError):
        queue.fail(job, EngineFailed("may pass"))
    monkeypatch.undo()
    queue.fail(job, EngineFailed("may pass"))
    assert places(connection, job_id) == ["scheduled"]


def test_a_repeat_that_could_not_be_written_is_counted_once(connection, plain, queue, monkeypatch):
    job_id = plain.enqueue(TASK_PATH, request=REQUEST, repeat=Repeat(times=1, interval=60)).id
    (job,) = queue.claim(8, Busy())
    monkeypatch.setattr(Queue, "schedule_job", _gone)
    with pytest.raises(RedisConnectionError):
        queue.finish(job, {"text": "done"})
    monkeypatch.undo()
    queue.finish(job, {"text": "done"})
    assert "scheduled" in places(connection, job_id)


def _gone(*args, **options):
    raise RedisConnectionError("gone")
