"""Ids that RQ's own tools cannot read: such a job fails with a reason, and affects no other job."""

import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from tests.support.lossy_proxy import LossyProxy
from tests.worker.queue.ends import finish

from stoker import JobFailed, JobNotFound, Producer
from stoker_shared.errors import RedisUnavailable
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

WEEK_S = 7 * 86_400
IDS = ["a.b", "good:a", "two words", "agent-ü", "日本", "x/../y", "x" * 1000 + "."]


def test_a_job_with_an_id_rq_cannot_read_is_failed_with_the_reason_and_other_jobs_run(
    connection, redis_url, queue, enqueue_by_hand
):
    for number, job_id in enumerate(IDS):
        enqueue_by_hand(job_id)
        enqueue_by_hand(f"good-{number}")
    finished = []
    while connection.llen("rq:queue:generate"):
        for job in queue.claim(8, Busy()):
            finish(job, {"text": "y"})
            finished.append(job.job_id)
    assert finished == [f"good-{number}" for number in range(len(IDS))]
    for job_id in IDS:
        [(_, entry)] = connection.xread({f"rq:results:{job_id}": "0-0"})[0][1]
        assert entry[b"type"] == b"2"
        with pytest.raises(JobFailed, match=r"InvalidRequest: .*letters.*digits") as caught:
            Producer(connection).ticket(job_id).result(timeout_s=1)
        assert "\n" not in caught.value.reason
        assert connection.hget(f"rq:job:{job_id}", "status") == b"failed"
        assert 0 < connection.ttl(f"rq:job:{job_id}") <= WEEK_S
        assert 0 < connection.ttl(f"rq:results:{job_id}") <= WEEK_S
    assert {member.decode() for member in connection.zrange("rq:failed:generate", 0, -1)} == set(IDS)
    assert connection.zcard("rq:wip:generate") == 0
    command = [sys.executable, "-m", "rq.cli", "info", "--raw", "--url", redis_url]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{len(IDS)} finished, {len(IDS)} failed" in printed


STRANGE = [job_id.encode() for job_id in IDS] + [b"\xff\xfe", b"line\nbreak", b""]


def test_ids_of_any_bytes_that_a_lost_worker_left_go_back_and_are_failed(connection, queue, enqueue_by_hand):
    for job_id in STRANGE:
        enqueue_by_hand(job_id)
        connection.lmove("rq:queue:generate", "rq:queue:generate:intermediate", "RIGHT", "RIGHT")
        connection.zadd("rq:wip:generate", {job_id + b"?": 1, job_id + b":" + job_id: 2})
    assert queue.recover() == len(STRANGE)
    assert set(connection.lrange("rq:queue:generate", 0, -1)) == set(STRANGE)
    while connection.llen("rq:queue:generate"):
        assert queue.claim(8, Busy()) == []
    assert set(connection.zrange("rq:failed:generate", 0, -1)) == set(STRANGE)


def test_after_a_lost_reply_such_a_job_is_failed_once(connection, redis_url, enqueue_by_hand):
    with LossyProxy(urlsplit(redis_url).port) as proxy:
        settings = read_settings({"redis_url": proxy.url})
        with open_queue(settings, proxy.url) as opened:
            queue = opened.rq_queue
            enqueue_by_hand("a.b")
            proxy.lose(lambda exchange: exchange.holds("EVALSHA", "rq:failed:generate"))
            with pytest.raises(RedisUnavailable):
                queue.claim(8, Busy())
            for _ in range(2):
                assert queue.recover() == 0
                assert queue.claim(8, Busy()) == []
    assert len(proxy.lost) == 1
    assert connection.xlen("rq:results:a.b") == 1
    assert connection.hget("rq:job:a.b", "status") == b"failed"


@pytest.mark.parametrize("status", [None, "canceled", "finished", "stopped"])
def test_an_id_without_a_waiting_job_is_dropped(connection, queue, status):
    connection.rpush("rq:queue:generate", "a.b")
    if status is not None:
        connection.hset("rq:job:a.b", "status", status)
    before = connection.hgetall("rq:job:a.b")
    assert queue.claim(8, Busy()) == []
    assert connection.hgetall("rq:job:a.b") == before
    assert connection.llen("rq:queue:generate") == 0
    assert not connection.exists("rq:failed:generate", "rq:results:a.b")


def test_canceling_such_a_waiting_job_reports_that_rq_cannot(producer, enqueue_by_hand):
    enqueue_by_hand("a.b")
    with pytest.raises(JobNotFound, match="letters"):
        producer.ticket("a.b").cancel()


def test_such_a_scheduled_job_is_failed_when_it_is_due(connection, queue, enqueue_by_hand):
    for job_id in (b"a.b", b"agent-\xc3\xbc", b"good"):
        enqueue_by_hand(job_id, status="scheduled")
        connection.zadd("rq:scheduled:generate", {job_id: 1})
    connection.delete("rq:queue:generate")
    queue.tidy()
    assert [job.job_id for job in queue.claim(8, Busy())] == ["good"]
    assert set(connection.zrange("rq:failed:generate", 0, -1)) == {b"a.b", b"agent-\xc3\xbc"}
