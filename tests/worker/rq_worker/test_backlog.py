"""Claiming looks ahead, claims in order, and leaves an id in exactly one list."""

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from stoker import Producer
from stoker_shared.wire import FIELD_ATTEMPTS, LEASE_KEY
from stoker_worker.rq_worker.backlog import Backlog

pytestmark = pytest.mark.server

LEASE = "mine"


@pytest.fixture
def connection(redis_url):
    with Redis.from_url(redis_url) as connection:
        connection.set(LEASE_KEY.format(queue="generate"), LEASE)
        yield connection


@pytest.fixture
def backlog(connection):
    return Backlog(connection, "generate", suspect_after=2)


@pytest.fixture
def submit(redis_url, connection):
    producer = Producer(redis_url)
    return lambda *agents: [producer.submit(agent_id=agent, prompt="x").job_id for agent in agents]


def waiting(connection):
    return Queue("generate", connection=connection, serializer=JSONSerializer).get_job_ids()


def claimed(connection):
    return [job_id.decode() for job_id in connection.lrange("rq:queue:generate:intermediate", 0, -1)]


def claim(backlog, limit=10, busy=(), lease=LEASE, nothing_runs=False):
    return backlog.claim(limit, frozenset(busy), lease, nothing_runs=nothing_runs)


def test_the_oldest_job_of_each_free_agent_is_claimed_in_queue_order(connection, backlog, submit):
    a1, _, b1, c1 = submit("a", "a", "b", "c")
    assert claim(backlog, busy=["c"]) == [a1, b1]
    assert claimed(connection) == [a1, b1]
    assert c1 in waiting(connection)
    assert len(waiting(connection)) == 2


def test_no_more_than_the_limit_is_claimed(backlog, submit):
    ids = submit("a", "b", "c")
    assert claim(backlog, limit=2) == ids[:2]
    assert claim(backlog, limit=2) == ids[2:]


def test_an_agent_behind_thousands_of_anothers_jobs_is_found(connection, redis_url, backlog, submit):
    Producer(redis_url).submit_many([{"agent_id": "greedy", "prompt": "x"}] * 1500)
    (other,) = submit("other")
    assert claim(backlog, busy=["greedy"]) == [other]
    assert len(waiting(connection)) == 1500


def test_nothing_is_claimed_by_a_worker_that_lost_its_lease(connection, backlog, submit):
    ids = submit("a")
    assert claim(backlog, lease="somebody else's") == []
    assert (waiting(connection), claimed(connection)) == (ids, [])


def test_a_job_that_was_canceled_since_it_was_seen_is_not_claimed(connection, backlog, submit):
    a, b = submit("a", "b")
    assert claim(backlog, busy=["a", "b"]) == []
    connection.lrem("rq:queue:generate", 1, a)
    assert claim(backlog) == [b]


def test_a_job_nobody_can_read_is_claimed_so_that_it_can_be_refused(connection, backlog, submit):
    (good,) = submit("a")
    connection.rpush("rq:queue:generate", "no-hash")
    connection.hset("rq:job:junk", mapping={"data": b"\x80junk", FIELD_ATTEMPTS: "many"})
    connection.set("rq:job:text", "not a hash")
    connection.rpush("rq:queue:generate", "junk", "text")
    assert claim(backlog) == [good, "no-hash", "junk", "text"]


def test_a_job_lost_twice_waits_until_nothing_runs_and_is_then_claimed_alone(connection, backlog, submit):
    first, suspect, behind = submit("a", "b", "c")
    connection.hset(f"rq:job:{suspect}", FIELD_ATTEMPTS, 2)
    assert claim(backlog, nothing_runs=True) == [first]
    assert backlog.waits_for_quiet
    assert claim(backlog, nothing_runs=False) == []
    assert claim(backlog, nothing_runs=True) == [suspect]
    assert claim(backlog) == [behind]


def test_the_agents_of_waiting_jobs_are_known_without_asking(connection, backlog, submit):
    assert backlog.agents() == frozenset()
    _, _, _, c1 = submit("a", "a", "b", "c")
    connection.rpush("rq:queue:generate", "no-hash")
    claim(backlog, busy=["b"], limit=1)
    claim(backlog, busy=["a", "b", "c"])
    before = backlog.agents()
    assert before == {"a", "b", "c"}
    claim(backlog, busy=["a", "b", "c"])
    assert backlog.agents() is before
    assert claim(backlog, busy=["a", "b"]) == [c1]
    assert backlog.agents() == {"a", "b"}


def test_jobs_that_left_the_queue_otherwise_are_forgotten_when_a_look_ends(connection, backlog, submit):
    _, b1 = submit("a", "b")
    claim(backlog, busy=["a", "b"])
    connection.lrem("rq:queue:generate", 1, b1)
    claim(backlog, busy=["a", "b"])
    assert backlog.agents() == {"a"}
    connection.delete("rq:queue:generate")
    assert claim(backlog) == []
    assert backlog.agents() == frozenset()
