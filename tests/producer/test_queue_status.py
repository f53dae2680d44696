"""The state of the queues: every job is counted once, in its state; and the table of `stoker workers`."""

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from rq.utils import utcformat
from tests.producer.played_worker import PlayedWorker, publish

from stoker import AsyncProducer, QueueStatus
from stoker.tables import duration
from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server


def status_of(producer, name="generate"):
    return next(queue for queue in producer.queues() if queue.name == name)


def counts(queue):
    return [queue.waiting, queue.running, queue.finished, queue.failed, queue.deferred, queue.scheduled]


def enqueued_ago(connection, ticket, **ago):
    connection.hset(f"rq:job:{ticket.job_id}", "enqueued_at", utcformat(datetime.now(UTC) - timedelta(**ago)))


def test_every_job_is_counted_in_its_state_until_it_expires(producer, connection):
    assert producer.queues() == []
    worker = PlayedWorker(connection)
    jobs = [producer.submit(prompt="x").job_id for _ in range(6)]
    worker.finish(jobs[0])
    worker.fail(jobs[1], "why")
    worker.start(jobs[2])
    connection.zadd("rq:wip:generate", {f"{jobs[2]}:e": 2e9})
    producer.submit(prompt="x", depends_on=jobs[3])
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    queue.enqueue_in(timedelta(hours=1), TASK_PATH, request={"prompt": "x"})
    producer.submit(prompt="x", queue="the other")
    assert [queue.name for queue in producer.queues()] == ["generate", "the other"]
    assert counts(status_of(producer)) == [3, 1, 1, 1, 1, 1]
    assert counts(status_of(producer, "the other")) == [1, 0, 0, 0, 0, 0]
    connection.zadd("rq:finished:generate", {"expired": 1, "kept for ever": "+inf"})
    connection.zadd("rq:failed:generate", {"expired": 1})
    assert counts(status_of(producer)) == [3, 1, 2, 1, 1, 1]


def test_the_oldest_wait_is_the_longest_even_behind_newer_jobs(producer, connection):
    first = producer.submit(prompt="x")
    enqueued_ago(connection, first, hours=1)
    enqueued_ago(connection, producer.submit(prompt="x", at_front=True), seconds=5)
    assert 3600 <= status_of(producer).oldest_wait_s < 3700
    enqueued_ago(connection, first, hours=-1)  # the producer's clock is ahead
    assert 0 <= status_of(producer).oldest_wait_s < 100


def test_jobs_that_cannot_be_read_do_no_harm(producer, connection):
    connection.sadd("rq:queues", "rq:queue:generate")
    connection.rpush("rq:queue:generate", b"no \xff job", "damaged")
    connection.hset("rq:job:damaged", "enqueued_at", "yesterday")
    assert producer.queues() == [QueueStatus("generate", 2, 0, 0, 0, 0, 0, oldest_wait_s=None, workers=())]


def test_the_workers_that_listen_are_named_and_their_queues_are_there_without_a_job(producer, connection, redis_url):
    producer.submit(prompt="x")
    publish(connection, "mac.1", "urgent", "generate")
    publish(connection, "mac.2", "generate")
    found = {"generate": ("mac.1", "mac.2"), "urgent": ("mac.1",)}
    assert {queue.name: queue.workers for queue in producer.queues()} == found

    async def ask():
        async with AsyncProducer(redis_url) as asynchronous:
            return await asynchronous.queues()

    assert {queue.name: queue.workers for queue in asyncio.run(ask())} == found


def test_workers_is_a_table_or_one_object(stoker, connection):
    assert stoker("workers") == (0, "no workers\n", "")
    width = {"max_batch": 32, "max_batch_why": "the default"}
    started = {"started_at": time.time() - 300}
    serving = {"model": "m/m", "context_tokens": 4096, "mode": "batched"}
    publish(connection, "mac.1", "urgent", "generate", **serving, **width, **started)
    publish(connection, "mac.2", "generate", **dict.fromkeys(serving), **started)
    code, out, err = stoker("workers")
    assert (code, err) == (0, "")
    heading, serving, loading = (line.split() for line in out.splitlines())
    assert heading == ["WORKER", "HOST", "PID", "UP", "CONTEXT", "JOBS", "QUEUES", "MODEL", "MODE"]
    assert serving == ["mac.1", "mac", "7", "5", "min", "4096", "32", "urgent,generate", "m/m", "batched"]
    assert loading == ["mac.2", "mac", "7", "5", "min", "-", "-", "generate", "loading", "-"]
    shown = json.loads(stoker("workers", "--json")[1])["workers"]
    assert [(worker["model"], worker["max_batch_why"]) for worker in shown] == [("m/m", "the default"), (None, None)]


def test_durations_are_short():
    seconds = [None, 0, 119.4, 120, 3600, 7200, 86400, 172800]
    assert [*map(duration, seconds)] == ["-", "0 s", "119 s", "2 min", "60 min", "2 h", "24 h", "2 d"]
