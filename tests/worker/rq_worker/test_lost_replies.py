"""The reply of one transaction or script is lost, in turn for every one there is: it was carried out, and the worker
must find that out, and do what comes after it."""

import threading
import time
from urllib.parse import urlsplit

import pytest
from rq import Callback, Retry
from rq.job import Dependency, Job
from rq.rate_limit import RateLimit
from rq.serializers import JSONSerializer
from tests.lossy_proxy import LossyProxy
from tests.worker.rq_worker import called_back
from tests.worker.rq_worker.looking import places
from tests.worker.rq_worker.test_callbacks import calls

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import TASK_PATH
from stoker_worker.outage import may_pass
from stoker_worker.ports import Busy
from stoker_worker.rq_worker.connect import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

MODULE = called_back.__name__
RESULT = {"text": "done"}
LEASE_S = 2


@pytest.fixture
def proxy(redis_url):
    with LossyProxy(urlsplit(redis_url).port) as proxy:
        yield proxy


@pytest.fixture
def opened(proxy):
    settings = read_settings(
        {"redis_url": proxy.url, "allow_callbacks": MODULE, "lease_ttl_s": LEASE_S, "heartbeat_s": 0.2}
    )
    with open_queue(settings, proxy.url) as opened:
        yield opened


@pytest.fixture
def queue(opened):
    return opened.rq_queue


@pytest.fixture
def enqueue(plain):
    def enqueue(job_id, agent="a", **options):
        request = {"agent_id": agent, "prompt": "x"}
        return plain.enqueue(TASK_PATH, request=request, job_id=job_id, **options)

    return enqueue


class InBackground(threading.Thread):
    """A call on a thread of its own, begun at once."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.error = call, None
        self.start()

    def run(self):
        try:
            self.call()
        except Exception as error:
            self.error = error


def again(call):
    """As the finaliser and the inbox do while Redis is away."""
    for _ in range(20):
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(0.01)
    raise AssertionError("Redis never came back")


def claim(queue, busy=frozenset()):
    return again(lambda: queue.claim(8, Busy(writing=frozenset(busy))))


def starts(exchange):
    return exchange.is_transaction and exchange.holds("rq:wip:generate", "ZADD")


def ends(exchange):
    return exchange.is_transaction and exchange.holds("rq:wip:generate", "ZREM")


def nothing_is_left(connection):
    left = [*connection.scan_iter("rq:execution*"), *connection.scan_iter("rq:worker:*:executions")]
    left += connection.zrange("rq:wip:generate", 0, -1) + connection.lrange("rq:queue:generate:intermediate", 0, -1)
    return left + list(connection.scan_iter("stoker:ended:*")) == []


def test_a_start_whose_reply_is_lost_is_a_start(connection, proxy, queue, enqueue):
    """Or the agent's next job overtakes the first, which recovery puts back later."""
    for job_id in ("first", "second"):
        enqueue(job_id)
    proxy.lose(starts)
    (job,) = claim(queue)
    assert proxy.lost
    assert job.job_id == "first"
    assert claim(queue, {"a"}) == []
    queue.finish(job, RESULT)
    (job,) = claim(queue)
    assert job.job_id == "second"
    queue.finish(job, RESULT)
    assert nothing_is_left(connection)
    assert [connection.xlen(f"rq:results:{job_id}") for job_id in ("first", "second")] == [1, 1]


def test_a_start_in_doubt_keeps_its_agents_next_job_waiting_and_nobody_elses(connection, proxy, queue, enqueue):
    """The connections go in the middle of a claim, and the look that should find out fails as well."""
    for job_id, agent in (("other", "b"), ("first", "a"), ("second", "a")):
        enqueue(job_id, agent)
    proxy.lose(lambda exchange: starts(exchange) and exchange.holds("rq:job:first"))
    proxy.lose(lambda exchange: exchange.holds("rq:execution:first:") and not exchange.is_transaction)
    claimed = [job.job_id for job in claim(queue)]
    claimed += [job.job_id for job in claim(queue, {"b", "a"} if "first" in claimed else {"b"})]
    assert len(proxy.lost) == 2
    assert claimed == ["other", "first"]
    assert places(connection, "second") == ["generate"]


def test_a_claim_whose_reply_is_lost_changes_no_order(connection, proxy, queue, enqueue):
    for job_id, agent in (("first", "a"), ("second", "a"), ("other", "b")):
        enqueue(job_id, agent)
    proxy.lose(lambda exchange: exchange.is_write and exchange.holds("generate:intermediate", "first"))
    assert {job.job_id for job in claim(queue)} == {"first", "other"}
    assert proxy.lost
    assert places(connection, "second") == ["generate"]


def test_an_end_whose_reply_is_lost_is_followed_by_all_that_follows_it(connection, proxy, queue, enqueue):
    enqueue("job", on_success=Callback(f"{MODULE}.succeeded"))
    enqueue("child", depends_on="job")
    (job,) = claim(queue)
    proxy.lose(ends)
    again(lambda: queue.finish(job, RESULT))
    assert proxy.lost
    assert places(connection, "child") == ["generate"]
    assert calls(connection) == [["succeeded", "job", "done", "finished"]]
    assert connection.xlen("rq:results:job") == 1
    with pytest.raises(OwnershipLost):
        queue.finish(job, RESULT)
    assert nothing_is_left(connection)


def test_a_failure_whose_reply_is_lost_sets_free_those_that_allow_it(connection, proxy, queue, enqueue):
    enqueue("job", on_failure=Callback(f"{MODULE}.failed"))
    enqueue("child", depends_on=Dependency(jobs=["job"], allow_failure=True))
    enqueue("strict", depends_on="job")
    (job,) = claim(queue)
    proxy.lose(ends)
    again(lambda: queue.fail(job, ValueError("x")))
    assert proxy.lost
    assert places(connection, "child") == ["generate"]
    assert places(connection, "strict") == ["deferred"]
    assert calls(connection) == [["failed", "job", "ValueError", "x", "failed"]]
    assert connection.xlen("rq:results:job") == 1
    assert nothing_is_left(connection)


def test_a_stop_whose_reply_is_lost_is_a_stop(connection, proxy, queue, enqueue):
    enqueue("job", on_stopped=Callback(f"{MODULE}.stopped"))
    (job,) = claim(queue)
    proxy.lose(ends)
    again(lambda: queue.stopped(job))
    assert proxy.lost
    assert calls(connection) == [["stopped", "job"]]
    assert connection.hget("rq:job:job", "status") == b"stopped"
    assert nothing_is_left(connection)


def test_a_retry_whose_reply_is_lost_is_one_retry(connection, proxy, queue, enqueue):
    enqueue("job", retry=Retry(max=1))
    enqueue("next")
    (job,) = claim(queue)
    proxy.lose(ends)
    again(lambda: queue.fail(job, ValueError("x")))
    assert proxy.lost
    assert connection.lrange("rq:queue:generate", 0, -1) == [b"job", b"next"]
    assert connection.hget("rq:job:job", "retries_left") == b"0"
    assert nothing_is_left(connection)


def test_a_refusal_whose_reply_is_lost_is_a_refusal(connection, proxy, queue, plain):
    plain.enqueue("os.getcwd", job_id="job", on_failure=Callback(f"{MODULE}.failed"))
    proxy.lose(ends)
    assert claim(queue) == []
    assert proxy.lost
    assert places(connection, "job") == ["failed"]
    assert [called[:2] for called in calls(connection)] == [["failed", "job"]]
    assert nothing_is_left(connection)


def test_a_job_given_back_twice_stands_in_front_once_and_is_counted(connection, proxy, queue, enqueue):
    enqueue("first")
    enqueue("second")
    (job,) = claim(queue)
    proxy.lose(lambda exchange: exchange.is_write and exchange.holds("rq:queue:generate:intermediate"))
    assert again(lambda: queue.give_back([job], counts_as_attempt=True)) == 1
    assert proxy.lost
    assert connection.lrange("rq:queue:generate", 0, -1) == [b"first", b"second"]
    assert connection.hget("rq:job:first", "stoker_attempts") == b"1"
    assert nothing_is_left(connection)


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_a_place_under_a_rate_limit_is_passed_on_at_once(connection, proxy, queue, enqueue, end):
    for job_id, agent in (("first", "a"), ("second", "b")):
        enqueue(job_id, agent, rate_limit=RateLimit(key="one", concurrency=1))
    (job,) = claim(queue)
    proxy.lose(ends)
    again(lambda: queue.finish(job, RESULT) if end == "finish" else queue.fail(job, ValueError("x")))
    assert proxy.lost
    assert [job.job_id for job in claim(queue)] == ["second"]


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_what_a_worker_left_undone_behind_an_end_is_done_by_the_next_one(
    redis_url, connection, plain, enqueue, monkeypatch, end
):
    """Killed between the transaction that ends a job and what follows it."""
    enqueue("job")
    allowing = Dependency(jobs=["job"], allow_failure=True)
    enqueue("child", "a", depends_on=allowing if end == "fail" else "job")
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as dead:
        (job,) = claim(dead.rq_queue)
        monkeypatch.setattr(dead.rq_queue._ender, "_follow_up", lambda *arguments: None)
        dead.rq_queue.finish(job, RESULT) if end == "finish" else dead.rq_queue.fail(job, ValueError("x"))
    assert places(connection, "child") in (["ready"], ["deferred"])
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as alive:
        alive.rq_queue.recover()
        assert places(connection, "child") == ["generate"]
        assert nothing_is_left(connection)


def test_a_dependent_that_cannot_be_read_keeps_no_end_from_being_over(connection, queue, enqueue):
    enqueue("job", on_failure=Callback(f"{MODULE}.failed"))
    enqueue("odd", depends_on=Dependency(jobs=["job"], allow_failure=True))
    connection.hset("rq:job:odd", "timeout", "no number")
    (job,) = claim(queue)
    queue.fail(job, ValueError("x"))
    assert [called[:2] for called in calls(connection)] == [["failed", "job"]]
    queue.tidy()
    queue.tidy()
    assert nothing_is_left(connection)


@pytest.mark.parametrize("damage", ["config", "places"])
def test_a_rate_limit_that_cannot_be_read_keeps_no_end_from_being_over(connection, queue, enqueue, damage):
    enqueue("job", rate_limit=RateLimit(key="one", concurrency=1))
    (job,) = claim(queue)
    if damage == "config":
        connection.hset("rq:rl:one", "concurrency", "no number")
    else:
        connection.set("rq:rl:one:allowed", "no set")
    queue.finish(job, RESULT)
    assert places(connection, "job") == ["finished"]
    assert queue.recover() == 0
    assert nothing_is_left(connection)


def test_a_failed_job_that_was_requeued_meanwhile_sets_nobody_free_on_its_old_failure(
    redis_url, connection, enqueue, monkeypatch
):
    enqueue("job")
    enqueue("child", depends_on=Dependency(jobs=["job"], allow_failure=True))
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as opened:
        (job,) = claim(opened.rq_queue)
        with monkeypatch.context() as patched:
            patched.setattr(opened.rq_queue._ender, "_follow_up", lambda *arguments: None)
            opened.rq_queue.fail(job, ValueError("x"))
        Job.fetch("job", connection, JSONSerializer).requeue()
        opened.rq_queue.recover()
        assert places(connection, "child") == ["deferred"]


@pytest.mark.parametrize("end", ["finish", "fail", "stopped", "give_back"])
def test_a_worker_keeps_its_lease_while_a_reply_hangs(connection, proxy, opened, enqueue, end):
    """Longer than the lease lasts: nothing the heartbeat needs may wait for it."""
    queue = opened.rq_queue
    enqueue("job")
    enqueue("other", "b")
    job, other = claim(queue)

    def is_the_end(exchange):  # and no heartbeat, which names the registry too
        is_ours = exchange.is_transaction or (exchange.is_write and exchange.holds("rq:queue:generate"))
        return is_ours and exchange.holds("rq:wip:generate", "job")

    proxy.hold_back(is_the_end, LEASE_S + 0.5)
    call = {
        "finish": lambda: queue.finish(job, RESULT),
        "fail": lambda: queue.fail(job, ValueError("x")),
        "stopped": lambda: queue.stopped(job),
        "give_back": lambda: queue.give_back([job], counts_as_attempt=False),
    }[end]
    start, ending, kept = time.monotonic(), InBackground(call), []
    while ending.is_alive():
        assert again(queue.beat)
        kept.append(connection.exists("stoker:lease:generate"))
        time.sleep(0.1)
    assert ending.error is None
    assert time.monotonic() - start > LEASE_S  # the reply did hang
    assert kept
    assert all(kept)
    queue.finish(other, RESULT)  # nor did the other threads that end jobs wait for it
    assert places(connection, "other") == ["finished"]


def test_a_heartbeat_gives_up_a_connection_that_hangs_before_the_lease_runs_out(connection, proxy, queue):
    assert again(queue.beat)
    proxy.hold_back(lambda exchange: exchange.is_write and exchange.holds("stoker:lease:generate"), 3 * LEASE_S)
    again(queue.beat)
    assert connection.exists("stoker:lease:generate")


def test_a_note_that_cannot_be_read_keeps_nothing_from_being_recovered(connection, queue, enqueue):
    enqueue("job")
    connection.hset("stoker:ended:generate", mapping={"a:b": "no JSON", "c": '{"of": "a later version"}'})
    connection.lmove("rq:queue:generate", "rq:queue:generate:intermediate")
    assert queue.recover() == 1
    assert nothing_is_left(connection)
