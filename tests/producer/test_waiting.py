"""Waiting on a real server: blocking reads, lost connections, ends that write no result."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from rq import SimpleWorker
from rq.serializers import JSONSerializer
from tests.producer.played_worker import PlayedWorker
from tests.support.server_fixture import require_server_program

import stoker.connection
import stoker.waiting
from stoker import JobCanceled, JobFailed, JobNotFound, Producer, RedisUnavailable, ResultTimeout
from stoker.operations import Commands, Pause
from stoker_worker.embedded_redis import EmbeddedServer

pytestmark = pytest.mark.server


@pytest.fixture
def blocked(each_step):
    """An event that is set whenever a blocking read begins."""
    event = threading.Event()
    each_step(lambda step: event.set() if is_block(step) else None)
    return event


def is_block(step):
    return isinstance(step, Commands) and step.commands[0][0] == "XREAD"


def when_blocked(event, action):
    """Run `action` on another thread once a blocking read has begun; returns its future."""

    def run():
        assert event.wait(20)
        action()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def test_a_wait_longer_than_the_connections_socket_timeout_leaves_the_connection_as_it_is(redis_url, blocked):
    with Redis.from_url(redis_url, socket_timeout=0.2, retry=None) as own:
        ticket = Producer(own).submit(agent_id="a", prompt="x")
        sleeps = []

        def finish_after_three_sleeps():
            while len(sleeps) < 3:
                assert blocked.wait(20)
                blocked.clear()
                sleeps.append(1)
            with Redis.from_url(redis_url) as other:
                PlayedWorker(other).finish(ticket.job_id)

        done = when_blocked(blocked, finish_after_three_sleeps)
        assert ticket.result(timeout_s=20).text == "hello"
        done.result()
        assert own.connection_pool.connection_kwargs["socket_timeout"] == 0.2


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda ticket, connection: ticket.cancel(), JobCanceled),
        (lambda ticket, connection: PlayedWorker(connection).stop(ticket.job_id), JobCanceled),
        (lambda ticket, connection: PlayedWorker(connection).job(ticket.job_id).delete(), JobNotFound),
    ],
    ids=["cancel", "stop", "delete"],
)
@pytest.mark.slow
def test_an_end_without_a_result_is_noticed_while_waiting(producer, connection, blocked, act, error):
    ticket = producer.submit(agent_id="a", prompt="x")
    done = when_blocked(blocked, lambda: act(ticket, connection))
    with pytest.raises(error):
        ticket.result()
    done.result()


def test_a_wait_after_a_failed_try_blocks_until_the_next_entry(producer, connection, each_step):
    ticket = producer.submit(agent_id="a", prompt="x")
    PlayedWorker(connection).start(ticket.job_id)
    PlayedWorker(connection).retry(ticket.job_id)
    reads = []
    each_step(lambda step: reads.append(step) if is_block(step) else None)
    with pytest.raises(ResultTimeout):
        ticket.result(timeout_s=0.3)
    assert len(reads) < 6


@pytest.mark.parametrize("n_jobs", [1, 30])
def test_a_wait_survives_the_servers_death_and_return(tmp_path, blocked, n_jobs):
    require_server_program()
    with EmbeddedServer(tmp_path / "redis") as server:
        url = server.url
        with Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as connection, ThreadPoolExecutor(1) as pool:
            producer = Producer(connection)
            tickets = producer.submit_many([{"agent_id": "a", "prompt": "x"}] * n_jobs)
            wait = (lambda: [tickets[0].result(60)]) if n_jobs == 1 else (lambda: producer.results(tickets, 60))
            waiting = pool.submit(wait)
            assert blocked.wait(20)
            server.stop()
            blocked.clear()
            assert blocked.wait(20), "it asks again while the server is away"
            with EmbeddedServer(tmp_path / "redis"):
                for ticket in tickets:
                    PlayedWorker(Redis.from_url(url)).finish(ticket.job_id, text=ticket.job_id)
                assert [result.text for result in waiting.result()] == [ticket.job_id for ticket in tickets]


@pytest.mark.parametrize(
    "read",
    [
        lambda producer, tickets: [result.text for result in producer.results(tickets, timeout_s=20)],
        lambda producer, tickets: [event.text for ticket in tickets for event in ticket.stream(timeout_s=20)],
    ],
    ids=["results", "stream"],
)
def test_a_connection_that_is_lost_right_after_enqueueing_is_endured(producer, connection, each_step, read):
    tickets = producer.submit_many([{"agent_id": "a", "prompt": "x"}] * 2)
    for ticket in tickets:
        PlayedWorker(connection).finish(ticket.job_id)
    lost = []

    def lose_the_first(step):
        if not lost and not isinstance(step, Pause):
            lost.append(step)
            raise RedisConnectionError

    each_step(lose_the_first)
    assert read(producer, tickets) == ["hello"] * 2
    assert lost


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_wait_as_redis_unavailable(tmp_path, blocked, monkeypatch):
    require_server_program()
    monkeypatch.setattr(stoker.connection, "_RETRIES", 1)  # each retry takes a while
    monkeypatch.setattr(stoker.waiting, "GIVE_UP_S", 0.5)
    with EmbeddedServer(tmp_path / "redis") as server, Producer(server.url) as producer:
        tickets = [producer.submit(agent_id="a", prompt="x") for _ in range(2)]
        done = when_blocked(blocked, server.stop)
        with pytest.raises(RedisUnavailable):
            tickets[0].result()
        done.result()
        with pytest.raises(RedisUnavailable):
            tickets[1].result(timeout_s=1)


def test_a_server_that_refuses_us_in_the_middle_of_a_wait_is_not_waited_out(producer, each_step):
    blocks = []

    def refuse(step):
        if is_block(step):
            blocks.append(step)
            raise AuthenticationError("password changed")

    each_step(refuse)
    with pytest.raises(RedisUnavailable, match="password changed"):
        producer.submit(agent_id="a", prompt="x").result(timeout_s=1)
    assert len(blocks) == 1


@pytest.mark.slow
def test_a_wrong_password_is_not_waited_out(redis_url):
    with pytest.raises(RedisUnavailable, match=r"^refused by the Redis server") as caught:
        Producer(redis_url.replace("redis://", "redis://nobody:hunter2@")).ticket("x").result(timeout_s=30)
    assert "hunter2" not in str(caught.value)


def test_a_stock_rq_worker_fails_a_job_with_our_line_last(producer, connection):
    ticket = producer.submit(agent_id="a", prompt="x")
    SimpleWorker(["generate"], connection=connection, serializer=JSONSerializer).work(burst=True)
    with pytest.raises(JobFailed) as caught:
        ticket.result(timeout_s=5)
    assert "WrongWorker: generation jobs need `stoker-worker run`" in caught.value.reason
