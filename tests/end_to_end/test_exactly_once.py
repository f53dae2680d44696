"""A delivery takes effect once, however often it is delivered."""

import subprocess
import sys
import time
import uuid

import pytest
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from tests.support.answers import without_total
from tests.support.store_reader import StoreReader
from tests.support.worker_process import burst

pytestmark = pytest.mark.server


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
    assert StoreReader(store).newest("a").number == 1
