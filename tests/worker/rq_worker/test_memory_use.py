"""Which of an agent's jobs wait for which: those that write, that read, and that do not use its memory."""

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from stoker_shared.wire import LEASE_KEY, TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.rq_worker.backlog import Backlog

pytestmark = pytest.mark.server

READS, WRITES, IS_OFF = {"agent_id": "a", "cache": "read"}, {"agent_id": "a"}, {"agent_id": "a", "cache": "off"}
NOBODY: dict[str, str] = {}
NOTHING = Busy()


@pytest.fixture
def connection(redis_url):
    with Redis.from_url(redis_url) as connection:
        connection.set(LEASE_KEY.format(queue="generate"), "mine")
        yield connection


@pytest.fixture(params=["our producer", "plain RQ"])
def enqueue(request, producer, connection):
    """By our producer, that notes in the job's hash what the worker looks for, or by one that does not."""
    plain = Queue("generate", connection=connection, serializer=JSONSerializer)

    def by_plain_rq(*uses):
        return [plain.enqueue_call(TASK_PATH, kwargs={"request": {"prompt": "x", **use}}).id for use in uses]

    def by_us(*uses):
        return [producer.submit(prompt="x", **use).job_id for use in uses]

    return by_us if request.param == "our producer" else by_plain_rq


@pytest.fixture
def claim(connection):
    backlog = Backlog(connection, "generate")

    def claim(busy=NOTHING, limit=20):
        backlog.read_ahead(limit, busy)
        return backlog.claim(limit, busy, "mine")

    return claim


def test_jobs_that_use_no_memory_wait_for_nobody(enqueue, claim):
    ids = enqueue(WRITES, WRITES, NOBODY, IS_OFF, NOBODY, IS_OFF)
    assert claim() == [ids[0], *ids[2:]]
    assert claim(Busy(writing=frozenset("a"))) == []


def test_those_that_read_go_side_by_side_between_the_writes_around_them(enqueue, claim):
    ids = enqueue(WRITES, READS, READS, READS, WRITES, READS)
    assert claim() == ids[:1]
    assert claim(Busy(writing=frozenset("a"))) == []
    assert claim(limit=2) == ids[1:3]
    assert claim(Busy(reading=frozenset("a"))) == ids[3:4]
    assert claim(Busy(reading=frozenset("a"))) == []
    assert claim() == ids[4:5]
    assert claim(Busy(writing=frozenset("a"))) == []
    assert claim() == ids[5:]


def test_an_agent_that_reads_much_keeps_its_writes_and_others_from_nothing(enqueue, claim):
    enqueue(*[READS] * 30)
    (other,) = enqueue({"agent_id": "other"})
    claimed = [job_id for _ in range(2) for job_id in claim(limit=1)]
    assert other in claimed


def test_notes_are_believed_only_in_the_form_they_have(connection, producer, claim):
    agent = "write of passage"
    job_id = producer.submit(prompt="x", agent_id=agent).job_id
    key = f"rq:job:{job_id}"
    moment, _, note = connection.hget(key, "stoker_agent").decode().partition(" ")
    assert note == f"write {agent}"
    for strange in ("", "write", "write ", "reads a", "none of them", agent.removeprefix("write ")):
        connection.hset(key, "stoker_agent", f"{moment} {strange}")
        fresh = Backlog(connection, "generate")
        fresh.read_ahead(1, Busy())
        assert fresh.agents() == {agent}
