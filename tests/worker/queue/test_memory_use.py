"""The order of an agent's jobs: those that write its memory, that read it, and that do not use it."""

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.worker.queue import members

from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server

READS, WRITES, IS_OFF = {"agent_id": "a", "cache": "read"}, {"agent_id": "a"}, {"agent_id": "a", "cache": "off"}
NOBODY: dict[str, str] = {}
NOTHING = Busy()


@pytest.fixture(params=["our producer", "plain RQ"])
def enqueue(request, producer, connection):
    """By our producer, which stores the memory use in the job's hash, or by one that does not."""
    plain = Queue("generate", connection=connection, serializer=JSONSerializer)

    def by_plain_rq(*uses):
        return [plain.enqueue_call(TASK_PATH, kwargs={"request": {"prompt": "x", **use}}).id for use in uses]

    def by_us(*uses):
        return [producer.submit(prompt="x", **use).job_id for use in uses]

    return by_us if request.param == "our producer" else by_plain_rq


@pytest.fixture
def claim(make_claimer):
    claimer = make_claimer()

    def claim(busy=NOTHING, limit=20):
        claimer.read_ahead(limit, busy)
        return [granted.job_id for granted in claimer.claim(limit, busy)]

    return claim


def test_jobs_that_use_no_memory_wait_for_no_other_job(enqueue, claim):
    ids = enqueue(WRITES, WRITES, NOBODY, IS_OFF, NOBODY, IS_OFF)
    assert claim() == [ids[0], *ids[2:]]
    assert claim(Busy(writing=frozenset("a"))) == []


def test_reading_jobs_run_together_between_the_writing_jobs_around_them(enqueue, claim):
    ids = enqueue(WRITES, READS, READS, READS, WRITES, READS)
    assert claim() == ids[:1]
    assert claim(Busy(writing=frozenset("a"))) == []
    assert claim(limit=2) == ids[1:3]
    assert claim(Busy(reading=frozenset("a"))) == ids[3:4]
    assert claim(Busy(reading=frozenset("a"))) == []
    assert claim() == ids[4:5]
    assert claim(Busy(writing=frozenset("a"))) == []
    assert claim() == ids[5:]


def test_stored_memory_use_of_an_unknown_form_is_ignored(connection, producer, make_claimer):
    agent = "write of passage"
    job_id = producer.submit(prompt="x", agent_id=agent).job_id
    key = f"rq:job:{job_id}"
    moment, _, note = connection.hget(key, "stoker_agent").decode().partition(" ")
    assert note == f"write {agent}"
    for strange in ("", "write", "write ", "reads a", "none of them", agent.removeprefix("write ")):
        connection.hset(key, "stoker_agent", f"{moment} {strange}")
        fresh = make_claimer()
        fresh.read_ahead(1, Busy())
        assert fresh.waiting.lines.agents() == {agent}


@pytest.mark.parametrize("use", [{}, {"cache": "read"}, {"context": "append"}, {"context": "append", "cache": "read"}])
def test_a_job_is_claimed_at_the_first_try_whatever_it_does_with_its_agent(enqueue, queue, use):
    """One that is not as its producer noted is started, put back and claimed once more; of two workers, each undoes
    what the other has learned of it."""
    job_ids = enqueue({"agent_id": "a", **use})
    assert members.ids(members.claim(queue)) == job_ids
