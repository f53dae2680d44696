"""Jobs are written with the same keys as by RQ's own enqueueing, but for empty fields, which RQ reads as missing."""

from datetime import datetime
from typing import Any

import pytest
from fakeredis import FakeRedis
from rq import Retry
from rq.job import Dependency
from rq.queue import Queue

from stoker import InvalidRequest, JobNotFound, Producer
from stoker.new_job import WireJson
from stoker_shared.wire import FIELD_AGENT, TASK_PATH

FIELDS: dict[str, Any] = {"agent_id": "a", "prompt": "hi", "max_tokens": 5}
TIMES = {"job_timeout": 3600, "result_ttl": 86_400, "failure_ttl": 7 * 86_400}
PLAIN = {"description": "generate for agent 'a'", "job_id": "new", **TIMES}


def rqs(connection):
    return Queue("generate", connection=connection, serializer=WireJson)


def parents(connection, **states):
    """Enqueues jobs of other producers, in these states."""
    for job_id, state in states.items():
        rqs(connection).enqueue(TASK_PATH, job_id=job_id)
        connection.hset(f"rq:job:{job_id}", "status", state)


def masked(value):
    """The value with its times masked, because they differ between two runs."""
    try:
        datetime.fromisoformat(value.decode())
    except ValueError:
        return value
    return b"a time"


def dump(connection):
    found = {}
    for key in sorted(connection.keys()):
        kind = connection.type(key)
        if kind == b"hash":
            fields = {name: masked(value) for name, value in connection.hgetall(key).items()}
            value = {name: value for name, value in fields.items() if value and name != FIELD_AGENT.encode()}
        elif kind == b"zset":
            value = connection.zrange(key, 0, -1)
        else:
            value = connection.smembers(key) if kind == b"set" else connection.lrange(key, 0, -1)
        found[key] = (value, connection.ttl(key))
    return found


SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "another queue's end": {"at_front": True},
    "retries with intervals": {"retry": Retry(2, [1, 60])},
    "retries at the front": {"retry": Retry(2, enqueue_at_front=True)},
    "behind a job that waits": {"depends_on": "waits"},
    "behind a job that has finished": {"depends_on": "finished"},
    "behind a job that has failed": {"depends_on": "failed"},
    "behind several": {"depends_on": ["finished", "waits"]},
}
"""RQ has these options under the same names."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (options, options) for name, options in SAME.items()
} | {
    "times": (
        {"job_timeout_s": 7, "result_ttl_s": 8, "failure_ttl_s": -1, "ttl_s": 10},
        {"job_timeout": 7, "result_ttl": 8, "failure_ttl": -1, "ttl": 10},
    ),
    "retries at once": ({"retry": 3}, {"retry": Retry(3)}),
    "behind a job that waits, with a ttl": ({"depends_on": "waits", "ttl_s": 9}, {"depends_on": "waits", "ttl": 9}),
    "behind a failed one that may": (
        {"depends_on": "failed", "allow_dependency_failures": True},
        {"depends_on": Dependency("failed", allow_failure=True)},
    ),
    "behind one that may fail": (
        {"depends_on": ["waits"], "allow_dependency_failures": True},
        {"depends_on": Dependency(["waits"], allow_failure=True)},
    ),
    "behind one, then at the front": (
        {"depends_on": "waits", "at_front": True},
        {"depends_on": Dependency("waits", enqueue_at_front=True)},
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES)
def test_every_key_is_as_rq_writes_it(ours, theirs):
    with FakeRedis() as left, FakeRedis() as right:
        for connection in (left, right):
            connection.flushall()
            parents(connection, waits="queued", finished="finished", failed="failed")
        Producer(left).submit(**FIELDS, job_id="new", **ours)
        rqs(right).enqueue(TASK_PATH, request={"v": 5, **FIELDS}, **{**PLAIN, **theirs})
        assert dump(left) == dump(right)


@pytest.mark.parametrize(("ours", "theirs"), [CASES["plain"], CASES["retries at once"], CASES["times"]])
def test_many_jobs_are_as_rq_writes_them(ours, theirs):
    with FakeRedis() as left, FakeRedis() as right:
        left.flushall(), right.flushall()
        Producer(left).submit_many([FIELDS] * 3, job_ids=["a", "b", "c"], **ours)
        options = {**PLAIN, **theirs}
        options["timeout"] = options.pop("job_timeout")
        jobs = [
            Queue.prepare_data(TASK_PATH, kwargs={"request": {"v": 5, **FIELDS}}, **{**options, "job_id": job_id})
            for job_id in "abc"
        ]
        rqs(right).enqueue_many(jobs)
        assert dump(left) == dump(right)


def test_a_worker_that_looks_ahead_finds_agent_and_access_beside_the_request(producer, connection):
    for fields, hint in (
        ({"agent_id": "a b"}, "write a b"),
        ({"agent_id": "a", "cache": "read"}, "read a"),
        ({"agent_id": "a", "cache": "off"}, "none"),
        ({"cache": "read"}, "none"),
        ({}, "none"),
    ):
        ticket = producer.submit(prompt="x", **fields)
        created_at, found = connection.hmget(f"rq:job:{ticket.job_id}", "created_at", FIELD_AGENT)
        assert found.decode() == f"{created_at.decode()} {hint}"


def test_a_job_cannot_depend_on_a_missing_job(producer, connection):
    with pytest.raises(JobNotFound, match="nobody") as caught:
        producer.submit(**FIELDS, depends_on=["nobody"])
    assert caught.value.job_id == "nobody"
    assert connection.keys() == []


def test_a_repeated_call_gives_the_same_job_even_if_its_dependency_has_expired(producer, connection):
    parent = producer.submit(**FIELDS)
    child = producer.submit(**FIELDS, job_id="child", depends_on=parent)
    connection.delete(f"rq:job:{parent.job_id}")
    assert producer.submit(**FIELDS, job_id="child", depends_on=parent).job_id == child.job_id
    assert child.status().state == "deferred"


def test_an_option_rq_does_not_take_is_refused_by_name(producer, connection):
    for option in ({"retry": 0}, {"retry": True}, {"retry": "3"}, {"depends_on": "a b"}, {"depends_on": [3]}):
        [named] = option
        with pytest.raises(InvalidRequest, match=named):
            producer.submit(**FIELDS, **option)
        with pytest.raises(InvalidRequest, match=named):
            producer.submit_many([FIELDS], **option)
    with pytest.raises(InvalidRequest, match="depends_on"):
        producer.submit(**FIELDS, allow_dependency_failures=True)
    assert connection.keys() == []
