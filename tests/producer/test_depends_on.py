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


def test_a_dependency_that_ends_during_the_enqueueing_is_noticed(producer, redis_url, tmp_path):
    with running_worker(redis_url, tmp_path / "store") as worker:
        worker.wait_until_ready()
        parents = [producer.submit(agent_id=f"p{n}", prompt="x", max_tokens=1 + n % 7) for n in range(60)]
        children = [
            producer.submit(agent_id=f"c{n}", prompt="x", max_tokens=2, depends_on=parent)
            for n, parent in enumerate(parents)
        ]
        assert len(producer.results(children, timeout_s=60)) == 60


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


def test_a_dependent_of_a_failed_job_runs_only_if_it_may(producer, redis_url, tmp_path):
    failed = producer.submit(agent_id="a", prompt="fail because", max_tokens=4)
    waits = producer.submit(agent_id="b", prompt="x", max_tokens=4, depends_on=failed)
    runs = producer.submit(agent_id="c", prompt="x", max_tokens=4, depends_on=failed, allow_dependency_failures=True)
    with running_worker(redis_url, tmp_path / "store"):
        assert runs.result(timeout_s=60).text
        assert waits.status().state == "deferred"
        late = producer.submit(
            agent_id="d", prompt="x", max_tokens=4, depends_on=failed, allow_dependency_failures=True
        )
        assert late.result(timeout_s=60).text


@pytest.mark.parametrize(("retry", "runs"), [(None, 1), (2, 3), (Retry(1, [1]), 2)])
def test_a_job_that_fails_is_tried_again_as_often_as_asked(producer, connection, redis_url, tmp_path, retry, runs):
    ticket = producer.submit(agent_id="a", prompt="fail because", max_tokens=4, retry=retry)
    with running_worker(redis_url, tmp_path / "store") as worker:
        [error] = producer.results([ticket], timeout_s=60, return_errors=True)
    assert isinstance(error, JobFailed)
    assert (error.kind, error.retryable) == ("EngineFailed", True)
    assert worker.log.count("error=EngineFailed reason=because") == runs
    assert connection.hget(f"rq:job:{ticket.job_id}", "retries_left") == (None if retry is None else b"0")
