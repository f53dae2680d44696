"""Cancels of jobs that plain RQ enqueued, on a real server: every key is as RQ's own cancel leaves it."""

from datetime import timedelta

import pytest
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer

from stoker import Producer
from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server


@pytest.fixture
def queue(server):
    return Queue("generate", connection=server, serializer=JSONSerializer)


def waiting(queue):
    queue.enqueue(TASK_PATH, job_id="j", failure_ttl=86_400)


def deferred(queue):
    queue.enqueue(TASK_PATH, job_id="before")
    queue.enqueue(TASK_PATH, job_id="j", depends_on="before")


def scheduled(queue):
    queue.enqueue_in(timedelta(hours=1), TASK_PATH, job_id="j")


def dump(server):
    """The members of every key, and the state of each job."""
    found = {}
    for key in server.scan_iter():
        kind = server.type(key)
        if kind == b"hash":
            found[key] = server.hget(key, "status")
        elif kind == b"zset":
            found[key] = {member.partition(b":")[0] for member in server.zrange(key, 0, -1)}
        else:
            found[key] = server.smembers(key) if kind == b"set" else server.lrange(key, 0, -1)
    return {key: value for key, value in found.items() if not key.startswith((b"rq:execution", b"rq:worker"))}


@pytest.mark.parametrize("play", [waiting, deferred, scheduled])
def test_a_canceled_job_is_where_rqs_own_cancel_puts_it(server, queue, play):
    play(queue)
    Job.fetch("j", server, JSONSerializer).cancel()
    rqs = dump(server)
    server.flushall()
    play(queue)
    assert Producer(server).ticket("j").cancel() is True
    assert dump(server) == rqs
    assert 0 < server.ttl("rq:job:j") <= 7 * 86_400


def test_a_canceled_job_is_kept_as_long_as_it_was_to_be(server):
    ticket = Producer(server).submit(prompt="x", failure_ttl_s=10**10)
    ticket.cancel()
    assert 10**9 < server.ttl(f"rq:job:{ticket.job_id}") <= 10**10
