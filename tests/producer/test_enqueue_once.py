"""A job is enqueued once, even if replies are lost and its producer repeats the call."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.exceptions import WatchError
from redis.retry import Retry
from tests.producer.played_worker import PlayedWorker
from tests.support.lossy_proxy import LossyProxy

import stoker.submitting
from stoker import DuplicateJob, InvalidRequest, Producer, RedisUnavailable
from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server
REQUEST: dict[str, Any] = {"agent_id": "a", "prompt": "x", "max_tokens": 4}


@pytest.fixture
def proxy(redis_url, server):
    with LossyProxy(urlsplit(redis_url).port) as proxy:
        yield proxy


@pytest.fixture(params=["redis-py tries again", "redis-py does not"])
def producer(request, proxy):
    tries = Retry(NoBackoff(), 3 if request.param == "redis-py tries again" else 0)
    with Redis.from_url(proxy.url, retry=tries, socket_timeout=5) as connection:
        yield Producer(connection)


def queued(server):
    return [job_id.decode() for job_id in server.lrange("rq:queue:generate", 0, -1)]


def nth(n):
    counter = iter(range(n + 1))
    return lambda exchange: next(counter, n) == n


def until_it_succeeds(call):
    """Repeats the call, as a producer with ids of its own can."""
    for _ in range(10):
        try:
            return call()
        except RedisUnavailable:
            pass
    raise AssertionError("ten lost replies, and there were fewer")


@pytest.mark.parametrize("lost", range(8))
def test_repeating_the_call_after_any_lost_reply_makes_no_second_job(proxy, producer, server, lost):
    proxy.lose(nth(lost))
    for n in range(4):
        until_it_succeeds(lambda n=n: producer.submit(**REQUEST, job_id=f"job-{n}"))
    assert len(proxy.lost) == 1
    assert queued(server) == [f"job-{n}" for n in range(4)]


@pytest.mark.parametrize("end", ["started", "finished", "failed", "canceled"])
def test_a_job_that_went_on_before_its_reply_was_lost_is_left_as_it_is(proxy, producer, server, end):
    worker = PlayedWorker(server)

    def plays_on(exchange):
        if not exchange.is_transaction:
            return False
        [job_id] = queued(server)
        play: dict[str, Callable[[str], object]] = {
            "started": worker.start,
            "finished": worker.finish,
            "failed": lambda job_id: worker.fail(job_id, "Bad: luck"),
            "canceled": lambda job_id: worker.job(job_id).cancel(),
        }
        play[end](job_id)
        return True

    proxy.lose(plays_on)
    ticket = producer.submit(**REQUEST)
    assert len(proxy.lost) == 1
    assert ticket.status().state == end
    assert queued(server) == []


@pytest.fixture
def late(monkeypatch):
    """The first transaction, for which its sender gave up waiting: its connection and its commands.

    As with a server that hangs for longer than the socket timeout: the packet is already on its way.
    """
    late, execute = [], Pipeline.execute

    def times_out_once(self, **options):
        if late or not self.explicit_transaction:
            return execute(self, **options)
        late.append((self.connection, list(self.command_stack)))
        self.connection, self.watching = None, False
        raise RedisTimeoutError

    monkeypatch.setattr(Pipeline, "execute", times_out_once)
    return late


def test_a_transaction_that_arrives_after_its_second_try_is_refused(redis_url, server, late):
    ticket = Producer(redis_url).submit(**REQUEST)
    [(connection, commands)] = late
    with server.pipeline() as pipeline, pytest.raises(WatchError):
        pipeline._execute_transaction(connection, commands, True)
    assert queued(server) == [ticket.job_id]


def test_a_transaction_that_arrives_just_before_its_second_try_makes_that_one_needless(
    redis_url, server, late, monkeypatch
):
    watch = Pipeline.watch

    def after_the_late_one(self, *keys):
        if late:
            with server.pipeline() as pipeline:
                pipeline._execute_transaction(*late[0], True)
        return watch(self, *keys)

    monkeypatch.setattr(Pipeline, "watch", after_the_late_one)
    ticket = Producer(redis_url).submit(**REQUEST)
    assert queued(server) == [ticket.job_id]


def test_many_jobs_of_which_some_chunks_arrived_are_completed_by_the_same_call(proxy, producer, server, monkeypatch):
    monkeypatch.setattr(stoker.submitting, "CHUNK_JOBS", 5)
    job_ids = [f"job-{n}" for n in range(20)]
    requests = [{**REQUEST, "prompt": job_id} for job_id in job_ids]
    proxy.lose(lambda exchange: exchange.is_transaction and exchange.holds("job-12"))
    proxy.lose(lambda exchange: exchange.holds("job-17"), times=20)
    with pytest.raises(RedisUnavailable):
        producer.submit_many(requests, job_ids=job_ids)
    arrived = queued(server)
    assert arrived[:15] == job_ids[:15]
    PlayedWorker(server).finish("job-3")
    tickets = until_it_succeeds(lambda: producer.submit_many(requests, job_ids=job_ids))
    assert [ticket.job_id for ticket in tickets] == job_ids
    assert queued(server) == [job_id for job_id in job_ids if job_id != "job-3"]


def test_an_id_of_another_job_is_refused_and_nothing_of_it_is_touched(server):
    producer = Producer(server)
    producer.submit(**REQUEST, job_id="mine")
    before = server.hgetall("rq:job:mine")
    for other in ({"prompt": "y"}, {"max_tokens": 5}, {"agent_id": "b"}, {"queue": "other"}):
        with pytest.raises(DuplicateJob, match="'mine'"):
            producer.submit(**{**REQUEST, **other}, job_id="mine")
    with pytest.raises(DuplicateJob, match="'mine'"):
        producer.submit_many([REQUEST, {**REQUEST, "prompt": "y"}], job_ids=["new", "mine"])
    assert server.hgetall("rq:job:mine") == before
    assert queued(server) == ["mine"]
    producer.submit_many([REQUEST] * 3, job_ids=["a", "mine", "c"])  # the rest of a chunk of which some are there
    assert queued(server) == ["mine", "a", "c"]


def test_an_id_behind_which_there_is_something_else_is_taken(server):
    server.set("rq:job:text", b"a string")
    pickled = {"data": b"\x80pickle", "origin": "generate"}
    for name, there in {"no-data": {"status": "queued"}, "no-origin": {"data": "[]"}, "pickled": pickled}.items():
        server.hset(f"rq:job:{name}", mapping=there)
    for name in ("text", "no-data", "no-origin", "pickled"):
        with pytest.raises(DuplicateJob):
            Producer(server).submit(**REQUEST, job_id=name)
    assert queued(server) == []


def test_the_same_job_by_redis_cli_or_with_a_default_written_out_is_the_same_job(server):
    data = json.dumps([TASK_PATH, None, [], {"request": {"max_tokens": 4, "prompt": "x", "v": 1, "agent_id": "a"}}])
    server.hset("rq:job:j", mapping={"status": "queued", "origin": "generate", "data": data})
    server.rpush("rq:queue:generate", "j")
    for written_out in ({}, {"temperature": 0.0}, {"top_p": None}):  # earlier versions omitted such fields
        assert Producer(server).submit(**REQUEST, **written_out, job_id="j").status().position == 0
    assert queued(server) == ["j"]
    server.delete("rq:job:j", "rq:queue:generate")  # it has expired
    Producer(server).submit(agent_id="b", prompt="y", job_id="j")
    assert queued(server) == ["j"]


def test_ids_that_rq_does_not_allow_or_that_are_not_one_for_each_request_are_refused(server):
    producer = Producer(server)
    refused: list[Any] = ["", "a.b", "a:b", "a b", "ü", 5]
    for job_id in refused:
        with pytest.raises(InvalidRequest, match="job_id"):
            producer.submit(**REQUEST, job_id=job_id)
        with pytest.raises(InvalidRequest, match="job_id"):
            producer.submit_many([REQUEST], job_ids=[job_id])
    for job_ids in (["a"], ["a", "b", "c"], ["a", "a"]):
        with pytest.raises(InvalidRequest, match="job_ids"):
            producer.submit_many([REQUEST] * 2, job_ids=job_ids)
    assert server.keys() == []


def test_a_server_that_loses_every_reply_is_given_up_with_a_clear_error(proxy, producer, server):
    proxy.lose(lambda exchange: exchange.is_transaction, times=1000)
    proxy.lose(lambda exchange: exchange.names == ("HMGET",), times=1000)
    with pytest.raises(RedisUnavailable):
        producer.submit(**REQUEST, job_id="j")
    assert queued(server) == ["j"]
