"""An id is enqueued again while its job runs: it ends once, in its agent's order."""

import time

import pytest
from rq import Queue
from rq.job import Dependency, Job
from rq.serializers import JSONSerializer
from tests.support.worker_process import running_worker

from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server

ENDED = (b"finished", b"failed", b"stopped", b"canceled")


@pytest.fixture
def worker(redis_url, tmp_path):
    with running_worker(redis_url, tmp_path / "store", "--scripted-steps-per-s", "50") as worker:
        yield worker.wait_until_ready()


@pytest.fixture
def enqueue(connection):
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)

    def enqueue(job_id, prompt, agent="a", *, timeout=60, **options):
        request = {"agent_id": agent, "prompt": prompt, "max_tokens": 100_000, "context": "append"}
        return queue.enqueue_call(TASK_PATH, kwargs={"request": request}, job_id=job_id, timeout=timeout, **options)

    return enqueue


@pytest.fixture
def until(connection, worker):
    def until(job_id, *states):
        worker.wait_for(lambda: connection.hget(f"rq:job:{job_id}", "status") in states, 30)

    return until


def texts(connection, job_id):
    return [result.return_value["text"] for result in Job.fetch(job_id, connection, JSONSerializer).results()]


def nothing_is_left(connection):
    return not (connection.zcard("rq:wip:generate") or list(connection.scan_iter("rq:execution*")))


def test_a_delivery_sent_many_times_is_one_run_with_one_timeout(connection, worker, enqueue, until):
    job = enqueue("job", "an endless one", timeout=6)
    until("job", b"started")
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    for _ in range(8):  # well within its timeout
        queue.enqueue_job(job)
        time.sleep(0.3)
    until("job", b"failed")
    (result,) = Job.fetch("job", connection, JSONSerializer).results()
    assert result.exc_string.startswith("GenerationTimedOut")
    assert nothing_is_left(connection)


@pytest.mark.parametrize(("prompt", "is_deleted"), [("say done", False), ("fail why", True)])
def test_an_id_that_waited_for_a_parent_and_was_used_again_runs_once_and_does_not_hold_up_its_parent(
    connection, worker, enqueue, until, prompt, is_deleted
):
    enqueue("first", "hold", timeout=2)
    enqueue("parent", prompt)
    enqueue("child", "say old", "b", depends_on=Dependency(jobs=["parent"], allow_failure=True))
    if is_deleted:
        Job.fetch("child", connection, JSONSerializer).delete()
    enqueue("child", "say new", "b")

    until("child", b"finished")
    until("parent", b"failed" if prompt.startswith("fail") else b"finished")
    enqueue("later", "say later", "b")
    until("later", b"finished")
    assert texts(connection, "child") == ["new"]
    assert nothing_is_left(connection) or not is_deleted
