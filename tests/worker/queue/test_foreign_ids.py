"""Ids that RQ's own tools cannot read: such a job fails with a reason, and affects no other job."""

import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from redis import Redis
from tests.support.lossy_proxy import LossyProxy
from tests.worker.queue.ends import finish

from stoker import JobFailed, JobNotFound, Producer
from stoker_shared.errors import RedisUnavailable
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

DATA = '["stoker_shared.task.generate", null, [], {"request": {"agent_id": "a", "prompt": "x", "max_tokens": 4}}]'
WEEK_S = 7 * 86_400
IDS = ["a.b", "good:a", "two words", "agent-ü", "日本", "x/../y", "x" * 1000 + "."]


@pytest.fixture
def server(redis_url):
    with Redis.from_url(redis_url) as server:
        yield server


def enqueue(server, job_id, **fields):
    """Enqueue with the README's commands."""
    key = b"rq:job:" + (job_id if isinstance(job_id, bytes) else job_id.encode())
    times = {"created_at": "2026-01-01T00:00:00.000000Z", "enqueued_at": "2026-01-01T00:00:00.000000Z"}
    server.hset(key, mapping={"status": "queued", "origin": "generate", "data": DATA, **times, **fields})
    server.sadd("rq:queues", "rq:queue:generate")
    server.rpush("rq:queue:generate", job_id)


def test_a_job_with_an_id_rq_cannot_read_is_failed_with_the_reason_and_other_jobs_run(server, redis_url, queue):
    for number, job_id in enumerate(IDS):
        enqueue(server, job_id)
        enqueue(server, f"good-{number}")
    finished = []
    while server.llen("rq:queue:generate"):
        for job in queue.claim(8, Busy()):
            finish(job, {"text": "y"})
            finished.append(job.job_id)
    assert finished == [f"good-{number}" for number in range(len(IDS))]
    for job_id in IDS:
        [(_, entry)] = server.xread({f"rq:results:{job_id}": "0-0"})[0][1]
        assert entry[b"type"] == b"2"
        with pytest.raises(JobFailed, match=r"InvalidRequest: .*letters.*digits") as caught:
            Producer(server).ticket(job_id).result(timeout_s=1)
        assert "\n" not in caught.value.reason
        assert server.hget(f"rq:job:{job_id}", "status") == b"failed"
        assert 0 < server.ttl(f"rq:job:{job_id}") <= WEEK_S
        assert 0 < server.ttl(f"rq:results:{job_id}") <= WEEK_S
    assert {member.decode() for member in server.zrange("rq:failed:generate", 0, -1)} == set(IDS)
    assert server.zcard("rq:wip:generate") == 0
    command = [sys.executable, "-m", "rq.cli", "info", "--raw", "--url", redis_url]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{len(IDS)} finished, {len(IDS)} failed" in printed


STRANGE = [job_id.encode() for job_id in IDS] + [b"\xff\xfe", b"line\nbreak", b""]


def test_ids_of_any_bytes_that_a_lost_worker_left_go_back_and_are_failed(server, queue):
    for job_id in STRANGE:
        enqueue(server, job_id)
        server.lmove("rq:queue:generate", "rq:queue:generate:intermediate", "RIGHT", "RIGHT")
        server.zadd("rq:wip:generate", {job_id + b"?": 1, job_id + b":" + job_id: 2})
    assert queue.recover() == len(STRANGE)
    assert set(server.lrange("rq:queue:generate", 0, -1)) == set(STRANGE)
    while server.llen("rq:queue:generate"):
        assert queue.claim(8, Busy()) == []
    assert set(server.zrange("rq:failed:generate", 0, -1)) == set(STRANGE)


def test_after_a_lost_reply_such_a_job_is_failed_once(server, redis_url):
    with LossyProxy(urlsplit(redis_url).port) as proxy, open_at(proxy.url) as queue:
        enqueue(server, "a.b")
        proxy.lose(lambda exchange: exchange.holds("EVALSHA", "rq:failed:generate"))
        with pytest.raises(RedisUnavailable):
            queue.claim(8, Busy())
        for _ in range(2):
            assert queue.recover() == 0
            assert queue.claim(8, Busy()) == []
    assert len(proxy.lost) == 1
    assert server.xlen("rq:results:a.b") == 1
    assert server.hget("rq:job:a.b", "status") == b"failed"


@pytest.mark.parametrize("status", [None, "canceled", "finished", "stopped"])
def test_an_id_without_a_waiting_job_is_dropped(server, queue, status):
    server.rpush("rq:queue:generate", "a.b")
    if status is not None:
        server.hset("rq:job:a.b", "status", status)
    before = server.hgetall("rq:job:a.b")
    assert queue.claim(8, Busy()) == []
    assert server.hgetall("rq:job:a.b") == before
    assert server.llen("rq:queue:generate") == 0
    assert not server.exists("rq:failed:generate", "rq:results:a.b")


def test_canceling_such_a_waiting_job_reports_that_rq_cannot(server):
    enqueue(server, "a.b")
    with pytest.raises(JobNotFound, match="letters"):
        Producer(server).ticket("a.b").cancel()


@contextmanager
def open_at(url):
    with open_queue(read_settings({"redis_url": url}), url) as opened:
        yield opened.rq_queue


def test_such_a_scheduled_job_is_failed_when_it_is_due(server, queue):
    for job_id in (b"a.b", b"agent-\xc3\xbc", b"good"):
        enqueue(server, job_id, status="scheduled")
        server.zadd("rq:scheduled:generate", {job_id: 1})
    server.delete("rq:queue:generate")
    queue.tidy()
    claimed = [job.job_id for _ in range(3) for job in queue.claim(8, Busy())]  # one job of an agent at a time
    assert claimed == ["good"]
    assert set(server.zrange("rq:failed:generate", 0, -1)) == {b"a.b", b"agent-\xc3\xbc"}
