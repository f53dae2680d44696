"""A reply hangs, or is lost while a worker registers; tests/end_to_end loses each of those of a worker that runs."""

import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from rq.job import Dependency
from tests.support.lossy_proxy import LossyProxy
from tests.worker.queue.ends import fail, finish, give_back
from tests.worker.queue.looking import LEASE, places

from stoker_shared.errors import OwnershipLost, RedisUnavailable
from stoker_worker.ports import Busy
from stoker_worker.queue.client import may_pass
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = [pytest.mark.server, pytest.mark.slow]

RESULT = {"text": "done"}
LEASE_S = 2


@pytest.fixture
def proxy(redis_url):
    with LossyProxy(urlsplit(redis_url).port) as proxy:
        yield proxy


@pytest.fixture
def opened(proxy):
    settings = read_settings({"redis_url": proxy.url, "lease_ttl_s": LEASE_S, "heartbeat_s": 0.2})
    with open_queue(settings, proxy.url) as opened:
        yield opened


@pytest.fixture
def queue(opened):
    return opened.rq_queue


def again(call):
    """Repeat the call, as the finisher and the fetcher do while Redis is away."""
    for _ in range(20):
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(0.01)
    raise AssertionError("Redis never came back")


def claim(queue):
    return again(lambda: queue.claim(8, Busy()))


def ends(exchange):
    return exchange.holds("EVALSHA", "rq:wip:generate", "ZREM")


def test_a_server_that_goes_away_while_a_worker_registers_is_named_as_away(proxy):
    proxy.lose(lambda exchange: exchange.holds("SETNAME"))
    with pytest.raises(RedisUnavailable), open_queue(read_settings({"redis_url": proxy.url}), proxy.url):
        pass
    assert proxy.lost


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_a_worker_finds_out_that_its_end_took_effect_though_the_reply_was_lost(connection, proxy, queue, enqueue, end):
    enqueue("job")
    enqueue("child", depends_on=Dependency(jobs=["job"], allow_failure=True))
    (job,) = claim(queue)
    proxy.lose(ends)
    again(lambda: finish(job, RESULT) if end == "finish" else fail(job, ValueError("x")))
    assert proxy.lost
    assert places(connection, "child") == ["generate"]
    assert connection.xlen("rq:results:job") == 1
    with pytest.raises(OwnershipLost):
        finish(job, RESULT)


def test_an_unreadable_dependent_does_not_prevent_an_end(connection, queue, enqueue):
    enqueue("job")
    for job_id in ("list", "text", "fine"):
        enqueue(job_id, "b", depends_on=Dependency(jobs=["job"], allow_failure=True))
    connection.delete("rq:job:text")
    connection.set("rq:job:text", "no hash")
    connection.delete("rq:job::list:dependencies")
    connection.rpush("rq:job::list:dependencies", "no set")
    enqueue("elsewhere", "b", depends_on=Dependency(jobs=["job"], allow_failure=True))
    connection.hset("rq:job:elsewhere", "origin", "text")
    connection.set("rq:queue:text", "no list")
    connection.zadd("rq:deferred:text", {"elsewhere": 1})
    (job,) = claim(queue)
    fail(job, ValueError("x"))
    assert connection.zscore("rq:deferred:text", "elsewhere")  # its queue is no list: it waits on
    assert connection.zcard("rq:wip:generate") == 0
    assert [places(connection, job_id) for job_id in ("list", "fine")] == [["deferred"], ["generate"]]


@pytest.mark.parametrize("end", ["finish", "give_back"])
def test_a_worker_keeps_its_lease_while_a_reply_hangs(connection, proxy, opened, enqueue, end):
    """The reply hangs longer than the lease lasts: the heartbeat may not wait for it."""
    queue = opened.rq_queue
    enqueue("job")
    enqueue("other", "b")
    job, other = claim(queue)

    def is_the_end(exchange):  # not a heartbeat, which names the registry too
        return ends(exchange) or exchange.holds("EVALSHA", "rq:queue:generate", "rq:wip:generate", "job")

    proxy.hold_back(is_the_end, LEASE_S + 0.5)
    call = {"finish": lambda: finish(job, RESULT), "give_back": lambda: give_back([job], counts_as_attempt=False)}[end]
    start, kept = time.monotonic(), []
    with ThreadPoolExecutor(1) as background:
        ending = background.submit(call)
        while not ending.done():
            assert again(queue.beat)
            kept.append(connection.exists(LEASE))
            time.sleep(0.1)
    ending.result()
    assert time.monotonic() - start > LEASE_S  # the reply did hang
    assert kept
    assert all(kept)
    finish(other, RESULT)  # the other threads that end jobs did not wait for it either
    assert places(connection, "other") == ["finished"]


def test_a_heartbeat_gives_up_a_connection_that_hangs_before_the_lease_runs_out(connection, proxy, queue):
    assert again(queue.beat)
    proxy.hold_back(lambda exchange: exchange.is_write and exchange.holds(LEASE), 3 * LEASE_S)
    again(queue.beat)
    assert connection.exists(LEASE)
