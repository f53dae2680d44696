"""Workers as producers and RQ's tools see them, from their start until after their loss."""

import logging

import pytest
from tests.support.worker_process import running_worker

from stoker import ResultTimeout

pytestmark = pytest.mark.server


def serving(producer):
    """The one worker, once it has published its models and queues."""
    return next((worker for worker in producer.workers() if worker.model is not None), None)


def warnings_of_the_producer(caplog):
    """Only the producer's: threads of other tests may still log."""
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name.startswith("stoker.")]


def test_a_misspelt_queue_is_named_beside_those_that_have_workers(producer, redis_url, store, caplog):
    with running_worker(redis_url, store, "--queues", "urgent,generate") as worker:
        worker.wait_until_ready()
        right = producer.submit(agent_id="a", prompt="x", max_tokens=3)
        assert warnings_of_the_producer(caplog) == []
        wrong = [producer.submit(agent_id="a", prompt="x", queue="genrate") for _ in range(3)]
        said = "no worker listens to 'genrate'; queues with workers: urgent, generate"
        assert warnings_of_the_producer(caplog) == [said]
        assert wrong[0].status().warning == said
        with pytest.raises(ResultTimeout, match="still queued .*; " + said):
            wrong[0].result(timeout_s=0)
        right.result(timeout_s=30)
        worker.wait_for(lambda: serving(producer) is not None)
        shown = serving(producer)
        assert shown.queues == ("urgent", "generate")
        assert (shown.model, shown.mode, shown.pid) == ("scripted", "batched", worker.pid)
        assert shown.context_tokens == 1 << 20
        assert producer.unattended() is None
    assert producer.workers() == []
    assert producer.unattended() == "no worker listens to 'generate', nor to any queue"
