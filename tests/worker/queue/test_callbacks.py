"""Callbacks run after the job's end is written, only those the operator allowed, and delay no other job."""

import json
import logging
import time

import pytest
from redis import Redis
from rq import Callback, Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.webhook import Webhook
from tests.worker.queue import called_back
from tests.worker.queue.ends import fail, finish, stop
from tests.worker.queue.looking import places

from stoker_shared.errors import EngineFailed
from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.queue.callbacks import Callbacks, CallbacksNotLoadable
from stoker_worker.queue.connect import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

MODULE = called_back.__name__
RESULT = {"text": "done"}


@pytest.fixture
def queue(redis_url):
    """As in conftest.py, with one module allowed."""
    called_back.hang.clear()
    with open_queue(read_settings({"redis_url": redis_url, "allow_callbacks": MODULE}), redis_url) as opened:
        yield opened.rq_queue
        called_back.hang.set()


@pytest.fixture
def start(plain, queue):
    """Enqueue a job with callbacks (functions of the module by name) and claim it."""

    def enqueue_and_claim(agent="a", timeout=5, retry=None, **names):
        callbacks = {when: Callback(f"{MODULE}.{name}", timeout=timeout) for when, name in names.items()}
        plain.enqueue(TASK_PATH, request={"agent_id": agent, "prompt": "x"}, job_id=agent, retry=retry, **callbacks)
        (job,) = queue.claim(1, Busy())
        return job

    return enqueue_and_claim


def calls(connection, count=1):
    """Wait for the first `count` calls and return them."""
    end = time.monotonic() + 20
    while connection.llen("called") < count and time.monotonic() < end:
        time.sleep(0.01)
    return [json.loads(call) for call in connection.lrange("called", 0, -1)]


def test_a_success_callback_gets_the_job_and_its_result(connection, queue, start):
    finish(start(on_success="succeeded", on_failure="failed", on_stopped="stopped"), RESULT)
    assert calls(connection) == [["succeeded", "a", "done", "finished"]]


def test_a_failure_callback_is_called_for_every_try_that_failed(connection, queue, start):
    fail(start(on_success="succeeded", on_failure="failed", retry=Retry(max=1)), EngineFailed("first"))
    (again,) = queue.claim(1, Busy())
    fail(again, EngineFailed("second"))
    first, second = calls(connection, 2)
    assert first[:4] == ["failed", "a", "EngineFailed", "first"]
    assert second == ["failed", "a", "EngineFailed", "second", "failed"]


def test_a_stopped_callback_is_called_for_a_stop_and_not_for_a_cancel(connection, queue, start):
    job = start("canceled", on_stopped="stopped")
    Job.fetch(job.job_id, connection, JSONSerializer).cancel()
    stop(job)
    stop(start("stopped", on_stopped="stopped"))
    assert calls(connection) == [["stopped", "stopped"]]


def test_a_callback_that_raises_changes_nothing_and_is_logged(connection, queue, start, caplog):
    job = start(on_success="raises")
    finish(job, RESULT)
    finish(start("b", on_success="succeeded"), RESULT)
    assert calls(connection) == [["succeeded", "b", "done", "finished"]]
    assert places(connection, "a") == ["finished"]
    assert "as a callback may" in caplog.text


def test_a_callback_that_hangs_delays_no_result_and_is_abandoned_after_its_timeout(connection, queue, start, caplog):
    finish(start(on_success="hangs", timeout=1), RESULT)
    finish(start("b", on_success="succeeded"), RESULT)
    assert places(connection, "a") == places(connection, "b") == ["finished"]
    assert calls(connection) == [["succeeded", "b", "done", "finished"]]
    assert not called_back.hang.is_set()
    assert f"{MODULE}.hangs of job a is left behind after 1 s" in caplog.text


def test_a_worker_runs_its_waiting_callbacks_before_it_stops(redis_url, connection, plain):
    settings = read_settings({"redis_url": redis_url, "allow_callbacks": MODULE})
    with open_queue(settings, redis_url) as opened:
        for n in range(5):
            request = {"agent_id": f"a{n}", "prompt": "x"}
            plain.enqueue(TASK_PATH, request=request, on_success=Callback(f"{MODULE}.slow"))
        for job in opened.rq_queue.claim(5, Busy()):
            finish(job, RESULT)
    assert connection.llen("called") == 5


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        f"{MODULE}.removedirs",
        f"{MODULE}._private",
        f"{MODULE}.asynchronous",
        f"{MODULE}.json.dumps",
        f"{MODULE}.nothing",
        MODULE,
    ],
)
@pytest.mark.parametrize("when", ["on_success", "on_failure", "on_stopped"])
def test_a_job_with_any_other_callback_is_refused_by_its_name(connection, plain, queue, when, path):
    request = {"agent_id": "a", "prompt": "x"}
    job = plain.enqueue(TASK_PATH, request=request, **{when: Callback(path)})
    assert queue.claim(1, Busy()) == []
    reason = Job.fetch(job.id, connection, JSONSerializer).latest_result().exc_string or ""
    assert reason.startswith("PayloadRefused")
    assert path in reason
    assert when in reason


def test_a_refused_job_still_gets_its_failure_callback(connection, plain, queue):
    plain.enqueue(TASK_PATH, request={"agent_id": ""}, job_id="bad", on_failure=Callback(f"{MODULE}.failed"))
    assert queue.claim(1, Busy()) == []
    ((_, job_id, kind, _, state),) = calls(connection)
    assert (job_id, kind, state) == ("bad", "InvalidRequest", "failed")


def test_a_job_with_a_webhook_is_refused_and_nothing_is_sent(connection, plain, queue, monkeypatch):
    sent = []
    monkeypatch.setattr(Webhook, "send", lambda *args, **options: sent.append(args))
    request = {"agent_id": "a", "prompt": "x"}
    job = plain.enqueue(TASK_PATH, request=request, webhooks=[Webhook("http://127.0.0.1:9/", "failed")])
    assert queue.claim(1, Busy()) == []
    assert "webhooks" in str(Job.fetch(job.id, connection, JSONSerializer).latest_result().exc_string)
    assert sent == []


def test_a_module_that_cannot_be_imported_stops_the_worker_at_start(redis_url):
    with Redis.from_url(redis_url) as connection, pytest.raises(CallbacksNotLoadable, match="no_such_module"):
        Callbacks(connection, ["no_such_module"])


def test_callbacks_behind_a_hanging_one_are_not_kept_forever(queue, start, monkeypatch, caplog):
    monkeypatch.setattr("stoker_worker.queue.callbacks._MAX_WAITING", 1)
    with caplog.at_level(logging.ERROR):
        for agent in "abcd":
            finish(start(agent, on_success="hangs", timeout=60), RESULT)
    called_back.hang.set()
    assert "is not run: 1 callbacks are waiting" in caplog.text
