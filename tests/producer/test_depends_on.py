"""Jobs that wait for others, and jobs that are retried, with a real worker."""

import dataclasses

import pytest
from rq import Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.producer.played_worker import PlayedWorker
from tests.support.worker_process import running_worker

from stoker import JobFailed
from stoker.operations import Watched

pytestmark = [pytest.mark.server, pytest.mark.slow]
FIELDS = {"agent_id": "a", "prompt": "x", "max_tokens": 4}


def times(connection, ticket):
    job = Job.fetch(ticket.job_id, connection, JSONSerializer)
    return job.started_at, job.ended_at


def test_jobs_run_after_those_they_depend_on(producer, connection, redis_url, tmp_path):
    first = producer.submit(**FIELDS)
    second = producer.submit(agent_id="b", prompt="x", max_tokens=4, depends_on=first)
    others = producer.submit_many([{**FIELDS, "agent_id": f"c{n}"} for n in range(3)], depends_on=[first, second])
    last = producer.submit(agent_id="d", prompt="x", max_tokens=4, depends_on=others, at_front=True)
    assert [ticket.status().state for ticket in (first, second, *others, last)] == ["queued"] + ["deferred"] * 5
    with running_worker(redis_url, tmp_path / "store"):
        producer.results([first, second, *others, last], timeout_s=60)
    assert times(connection, second)[0] >= times(connection, first)[1]
    assert all(times(connection, ticket)[0] >= times(connection, second)[1] for ticket in others)
    assert times(connection, last)[0] >= max(times(connection, ticket)[1] for ticket in others)


def test_a_job_whose_dependency_ends_between_the_read_and_the_write_is_enqueued_at_once(
    producer, connection, each_step, monkeypatch
):
    parent = producer.submit(**FIELDS)

    def with_an_end_in_between(step):
        if not isinstance(step, Watched):
            return None

        def write(replies):
            monkeypatch.undo()
            PlayedWorker(connection).finish(parent.job_id)
            return step.write(replies)

        return dataclasses.replace(step, write=write)

    each_step(with_an_end_in_between)
    child = producer.submit(**FIELDS, depends_on=parent)
    assert child.status().state == "queued"
    assert connection.zcard("rq:deferred:generate") == 0


def test_a_job_that_fails_is_tried_as_often_as_asked_and_its_dependents_run_only_if_they_may(
    producer, connection, redis_url, tmp_path
):
    asked = {"once": None, "twice-more": 2, "later": Retry(1, [1])}
    once, *again = [
        producer.submit(agent_id=why, prompt=f"fail {why}", max_tokens=4, retry=retry) for why, retry in asked.items()
    ]
    may = {"depends_on": once, "allow_dependency_failures": True}
    waits = producer.submit(agent_id="b", prompt="x", max_tokens=4, depends_on=once)
    runs = producer.submit(agent_id="c", prompt="x", max_tokens=4, **may)
    with running_worker(redis_url, tmp_path / "store") as worker:
        errors = producer.results([once, *again], timeout_s=60, return_errors=True)
        assert runs.result(timeout_s=60).text
        assert waits.status().state == "deferred"
        assert producer.submit(agent_id="d", prompt="x", max_tokens=4, **may).result(timeout_s=60).text
    assert [(type(error), error.kind, error.retryable) for error in errors] == [(JobFailed, "EngineFailed", True)] * 3
    assert [worker.log.count(f"error=EngineFailed reason={why}") for why in asked] == [1, 3, 2]
    left = [connection.hget(f"rq:job:{ticket.job_id}", "retries_left") for ticket in (once, *again)]
    assert left == [None, b"0", b"0"]
