"""A delivery takes effect once, however often it is delivered; a new delivery takes effect again."""

import json
import signal
import subprocess
import sys
import time
import uuid

import pytest
from rq import Queue
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from tests.support.answers import without_total
from tests.support.worker_process import running_worker

from stoker_shared.wire import TASK_PATH
from stoker_worker.memory.store import AgentCacheStore

pytestmark = pytest.mark.server


def burst(redis_url, store, *options, log_name="burst.log"):
    with running_worker(redis_url, store, "--burst", *options, log_name=log_name) as worker:
        assert worker.wait() == 0, worker.log
    return worker.log


def version_of(store, agent_id):
    opened = AgentCacheStore(store)
    try:
        return opened.open_agent(agent_id).number
    finally:
        opened.close()


def as_if_the_worker_died_after_saving(connection, job_id, expires_at):
    """Restore the keys of a job whose turn is saved and whose end is not written."""
    execution = uuid.uuid4().hex
    connection.zrem("rq:finished:generate", job_id)
    connection.delete(f"rq:results:{job_id}")
    connection.hset(f"rq:job:{job_id}", mapping={"status": "started", "worker_name": "stoker-gone"})
    connection.persist(f"rq:job:{job_id}")
    connection.zadd("rq:wip:generate", {f"{job_id}:{execution}": expires_at})
    connection.hset(f"rq:execution:{job_id}:{execution}", mapping={"worker_name": "stoker-gone", "created_at": 1})


@pytest.mark.parametrize("context", ["full", "append"])
def test_a_saved_job_that_rq_failed_and_an_operator_requeued_is_not_generated_again(
    producer, redis_url, connection, store, context
):
    ticket = producer.submit(agent_id="a", prompt="x", context=context, max_tokens=5)
    burst(redis_url, store)
    first = ticket.result(timeout_s=1)
    as_if_the_worker_died_after_saving(connection, ticket.job_id, expires_at=time.time() - 1)
    StartedJobRegistry("generate", connection=connection, serializer=JSONSerializer).cleanup()
    assert ticket.status().state == "failed"
    requeue = [sys.executable, "-m", "rq.cli", "requeue", "-u", redis_url, "-S", "json", "--queue", "generate", "--all"]
    subprocess.run(requeue, check=True, capture_output=True)
    log = burst(redis_url, store, log_name="second.log")
    assert "replayed job=" in log
    assert without_total(ticket.result(timeout_s=1)) == without_total(first)
    assert version_of(store, "a") == 1


def test_a_reused_id_is_a_new_delivery(redis_url, connection, store):
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    request = {"agent_id": "a", "prompt": "x", "context": "append", "max_tokens": 4}
    for version in (1, 2):
        queue.enqueue(TASK_PATH, request=request, job_id="mine", unique=True)
        burst(redis_url, store, log_name=f"{version}.log")
        job = Job.fetch("mine", connection, JSONSerializer)
        assert job.return_value()["cache"]["agent_version"] == version
        job.delete()


def by_redis_cli(connection, request, **fields):
    """Enqueue with the README's commands, with one id for all."""
    data = json.dumps([TASK_PATH, None, [], {"request": request}])
    connection.hset("rq:job:mine", mapping={"status": "queued", "origin": "generate", "data": data, **fields})
    connection.rpush("rq:queue:generate", "mine")


@pytest.mark.parametrize("fields", [{}, {"created_at": "2026-01-01T00:00:00.000000Z"}], ids=["no time", "one time"])
def test_a_reused_id_with_another_prompt_is_generated(connection, redis_url, store, fields):
    request = {"agent_id": "a", "context": "append", "max_tokens": 5}
    texts = []
    for prompt in ("say one", "say two"):
        connection.delete("rq:job:mine")
        by_redis_cli(connection, {**request, "prompt": prompt}, **fields)
        burst(redis_url, store)
        result = Job.fetch("mine", connection, JSONSerializer).return_value()
        texts.append((result["text"], result["cache"]["agent_version"]))
    assert texts == [("one", 1), ("two", 2)]


def test_a_worker_that_slept_past_its_lease_writes_neither_version_nor_result(
    producer, redis_url, connection, tmp_path
):
    patience = {"STOKER_HEARTBEAT_S": "0.5", "STOKER_LEASE_TTL_S": "2", "STOKER_RECOVER_S": "0.2"}
    ticket = producer.submit(agent_id="a", prompt="x", context="append", max_tokens=60)
    steps = ("--scripted-steps-per-s", "100")
    with running_worker(redis_url, tmp_path / "sleeper", *steps, env=patience) as sleeper:
        sleeper.wait_for(lambda: ticket.status().state == "started")
        sleeper.signal(signal.SIGSTOP)
        with running_worker(redis_url, tmp_path / "other", "--standby", "--new-store", env=patience) as other:
            other.wait_for(lambda: ticket.status().state == "finished")
            sleeper.signal(signal.SIGCONT)
            assert sleeper.wait() == 1
    assert "QueueHeld" in sleeper.log
    assert version_of(tmp_path / "sleeper", "a") == 0
    assert version_of(tmp_path / "other", "a") == 1
    assert ticket.result(timeout_s=1).attempt == 2
    assert connection.xlen(f"rq:results:{ticket.job_id}") == 1
