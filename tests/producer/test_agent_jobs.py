"""Jobs about an agent's memory: their keys in Redis, and requests that are refused before they get there."""

import pytest
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from stoker import InvalidRequest, Producer, ResultTimeout
from stoker_shared import task
from stoker_shared.errors import WrongWorker


def enqueued(producer: Producer, connection: Redis, action: str, *arguments: object, **options: object) -> Job:
    with pytest.raises(ResultTimeout) as late:
        getattr(producer.agents, action)(*arguments, timeout_s=0, **options)
    return Job.fetch(late.value.job_id, connection=connection, serializer=JSONSerializer)


@pytest.mark.parametrize(
    ("action", "arguments", "options", "fields", "word"),
    [
        ("info", (), {}, {}, b"read"),
        ("forget", (), {"expect_version": 3}, {"expect_version": 3}, b"write"),
        ("fork", ("b",), {}, {"target": "b"}, b"write"),
        ("rollback", (), {}, {}, b"write"),
        ("rollback", (2,), {"queue": "high"}, {"version": 2}, b"write"),
    ],
)
def test_each_is_a_plain_rq_job_in_its_agents_line(producer, connection, action, arguments, options, fields, word):
    job = enqueued(producer, connection, action, "an agent", *arguments, **options)
    assert job.func_name == "stoker_shared.task.agent"
    assert job.kwargs == {"request": {"v": 1, "agent_id": "an agent", "action": action, **fields}}
    assert connection.lrange(f"rq:queue:{options.get('queue', 'generate')}", 0, -1) == [job.id.encode()]
    created_at, *hint = connection.hget(job.key, "stoker_agent").split(b" ", 2)
    assert created_at == connection.hget(job.key, "created_at")
    assert hint == [word, b"an agent"]
    assert job.description == f"{action} for agent 'an agent'"


def test_an_invalid_request_is_refused_before_it_is_enqueued(producer, connection):
    for call in (
        lambda agents: agents.info(""),
        lambda agents: agents.fork("a", "b\n"),
        lambda agents: agents.rollback("a", 0),
        lambda agents: agents.forget("a", expect_version=0),
        lambda agents: agents.info("a", queue=""),
        lambda agents: agents.info("a", job_id="a:b"),
    ):
        with pytest.raises(InvalidRequest):
            call(producer.agents)
    assert connection.keys("*") == []


@pytest.mark.parametrize("function", [task.agent, task.generate])
def test_a_stock_worker_fails_it_with_a_clear_line(function):
    with pytest.raises(WrongWorker, match="stoker-worker run"):
        function(request={"agent_id": "a", "action": "info"})
