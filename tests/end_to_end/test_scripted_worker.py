"""The whole path in real processes, with the engine without a model."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from rq import Callback, Queue
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from tests.support.worker_process import WorkerProcess, burst, running_worker

from stoker_shared.errors import JobFailed
from stoker_shared.wire import TASK_PATH
from stoker_worker.memory.locks import store_name

pytestmark = pytest.mark.server


def registries(connection):
    """Ids by registry, read the way RQ's own tools do."""
    options = {"connection": connection, "serializer": JSONSerializer}
    return {
        "queued": Queue("generate", **options).get_job_ids(),
        "started": StartedJobRegistry("generate", **options).get_job_ids(cleanup=False),
        "finished": FinishedJobRegistry("generate", **options).get_job_ids(),
        "failed": FailedJobRegistry("generate", **options).get_job_ids(),
    }


def test_a_short_job_overtakes_long_ones_and_rq_sees_all_of_them_executing(producer, redis_url, connection, store):
    endless = {"max_tokens": 32_000, "fit_max_tokens": True, "min_tokens": 200}
    long = [producer.submit(agent_id=f"long-{n}", prompt="x", **endless) for n in range(8)]
    with running_worker(redis_url, store, "--scripted-steps-per-s", "12") as worker:
        worker.wait_for(lambda: len(registries(connection)["started"]) == 8)

        def info() -> str:
            command = [sys.executable, "-m", "rq.cli", "info", "--url", redis_url]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        assert "8 executing" in info()
        worker.wait_for(lambda: "busy" in info())  # written by the next heartbeat
        producer.submit(agent_id="short", prompt="x", max_tokens=10).result(timeout_s=30)
        assert {ticket.status().state for ticket in long} == {"started"}
        assert sorted(registries(connection)["started"]) == sorted(ticket.job_id for ticket in long)
        worker.kill()  # else it would let them finish


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_rq_info_takes_no_job_from_a_worker_that_was_down_or_asleep_for_a_day(
    producer, redis_url, connection, store, end
):
    """RQ's tools fail a job whose lease is over, and operators use them on such a day."""
    ticket = producer.submit(agent_id="a", prompt="x", max_tokens=200)
    with running_worker(redis_url, store, "--scripted-steps-per-s", "40") as first:
        first.wait_for(lambda: (ticket.status().tokens or 0) > 3)
        first.signal(end)
        time.sleep(0.2)
        for entry, lease_until in connection.zrange("rq:wip:generate", 0, -1, withscores=True):
            connection.zadd("rq:wip:generate", {entry: lease_until - 86_400})
        subprocess.run([sys.executable, "-m", "rq.cli", "info", "--url", redis_url], capture_output=True, check=True)
        assert ticket.status().state == "started"
        first.signal(signal.SIGCONT)
        if end == signal.SIGKILL:
            first.wait()
            burst(redis_url, store)
        assert ticket.result(timeout_s=30).attempt == (2 if end == signal.SIGKILL else 1)


def test_a_job_that_kills_its_worker_three_times_alone_is_failed_with_the_reason(producer, redis_url, store):
    poison = producer.submit(agent_id="poison", prompt="crash", max_tokens=5)
    beside = producer.submit(agent_id="beside", prompt="x", max_tokens=400)
    for attempt in range(5):
        with running_worker(redis_url, store, log_name=f"{attempt}.log") as worker:
            worker.wait()
            assert worker.returncode == -signal.SIGKILL
    burst(redis_url, store)
    with pytest.raises(JobFailed, match="WorkerLostTooOften: alone in flight while 3 workers died"):
        poison.result(timeout_s=1)
    result = beside.result(timeout_s=1)
    assert (result.finish_reason, result.attempt) == ("length", 3)  # beside the poison twice; then each ran alone


def test_a_broken_engine_stops_the_worker_loudly_and_its_jobs_are_given_back(producer, redis_url, connection, store):
    breaking = producer.submit(agent_id="breaking", prompt="break now", max_tokens=5)
    beside = producer.submit(agent_id="beside", prompt="x", max_tokens=400)
    with running_worker(redis_url, store) as worker:
        assert worker.wait() == 1
        assert "EngineFailed: the engine broke" in worker.log.strip().splitlines()[-1]
    assert registries(connection)["queued"] == [breaking.job_id, beside.job_id]
    for log_name in ("2.log", "3.log", "4.log", "5.log", "6.log"):
        with running_worker(redis_url, store, "--burst", log_name=log_name) as worker:
            worker.wait()
    with pytest.raises(JobFailed, match="WorkerLostTooOften"):
        breaking.result(timeout_s=1)
    assert beside.result(timeout_s=1).finish_reason == "length"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_a_worker_that_is_leaving_do_not_make_it_look_lost(redis_url, tmp_path, signum):
    with running_worker(redis_url, tmp_path / "store") as worker:
        worker.wait_until_ready()
        end = time.monotonic() + 30
        while worker.returncode is None and time.monotonic() < end:
            worker.signal(signum)
            time.sleep(0.001)
        assert worker.returncode == 0, worker.log


def test_a_stop_drains_the_running_jobs_and_leaves_the_rest_in_the_queue(producer, redis_url, connection, store):
    tickets = [producer.submit(agent_id=f"a{n}", prompt="x", max_tokens=30) for n in range(6)]
    with running_worker(redis_url, store, "--max-batch", "2", "--scripted-steps-per-s", "30") as worker:
        worker.wait_for(lambda: len(registries(connection)["started"]) == 2)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log
    found = registries(connection)
    assert (len(found["finished"]), found["started"], found["failed"]) == (2, [], [])
    assert found["queued"] == [ticket.job_id for ticket in tickets[2:]]


def test_a_second_stop_gives_running_jobs_back_in_order_at_once(producer, redis_url, connection, store):
    tickets = [producer.submit(agent_id=f"a{n}", prompt="x", max_tokens=10_000) for n in range(5)]
    with running_worker(redis_url, store, "--max-batch", "3", "--scripted-steps-per-s", "30") as worker:
        worker.wait_for(lambda: len(registries(connection)["started"]) == 3)
        worker.signal(signal.SIGTERM)
        time.sleep(0.3)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log
    assert registries(connection)["queued"] == [ticket.job_id for ticket in tickets]
    assert all(Job.fetch(ticket.job_id, connection, JSONSerializer).get_status() == "queued" for ticket in tickets)


def test_agents_share_no_cache_and_ram_keeps_none_where_it_is_so_asked_for_and_a_prompt_comes_back(
    producer, redis_url, store
):
    brief = "You are one of many agents. " * 40
    with running_worker(redis_url, store, "--no-share-prefixes", "--memory-max-bytes", "0"):
        first, other = (producer.submit(agent_id=one, prompt=brief, max_tokens=4).result(timeout_s=30) for one in "ab")
        more = {"context": "append", "max_tokens": 4, "return_prompt": True}
        again = producer.submit(agent_id="a", prompt="and?", **more).result(timeout_s=30)
    assert [result.usage.cached_tokens for result in (first, other)] == [0, 0]
    assert again.cache.source == "disk"
    assert again.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert (again.prompt.text[: len(brief)], again.prompt.text[-4:]) == (brief, "and?")
    assert len(again.prompt.token_ids) == again.usage.prompt_tokens


BAD_PAYLOADS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"prompt": "x", "colour": "red"}, "InvalidRequest: colour"),
    "lone surrogate": ({"prompt": "\ud800"}, "InvalidRequest: prompt"),
    "NaN": ({"prompt": "x", "temperature": float("nan")}, "InvalidRequest: temperature"),
    "newer version": ({"prompt": "x", "v": 6}, "RequestVersionTooNew: .*v 6.*v 5"),
    "other model": ({"prompt": "x", "model": "gpt"}, "ModelMismatch: .*'gpt'.*'scripted'"),
    "over the context": ({"prompt": "x", "max_tokens": 2_000_000}, "ContextLimitExceeded: .*2000001"),
}  # fmt: skip


def test_every_bad_job_fails_with_one_line_and_the_jobs_beside_it_finish(producer, redis_url, connection, store):
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    jobs = {
        name: queue.enqueue(TASK_PATH, request={"agent_id": "bad", **fields}).id
        for name, (fields, _) in BAD_PAYLOADS.items()
    }
    pickled = Queue("generate", connection=connection).enqueue(TASK_PATH, request={"agent_id": "p", "prompt": "x"})
    unknown = queue.enqueue("os.system", "true")
    callback = queue.enqueue(TASK_PATH, request={"agent_id": "c", "prompt": "x"}, on_success=Callback("os.system"))
    huge = queue.enqueue(TASK_PATH, request={"agent_id": "h", "prompt": "x" * 50_000_000})
    connection.set("rq:job:no-hash", "text")
    connection.hset("rq:job:junk", mapping={"data": b"\x80junk", "timeout": "soon", "stoker_attempts": "many"})
    connection.rpush("rq:queue:generate", "no-hash", "junk", "nothing-at-all")
    good = [
        producer.submit(agent_id=agent_id, prompt="x", max_tokens=3)
        for agent_id in ("../../etc/passwd", "a/b", ".", "\U0001f469\u200d\U0001f4bb", "  ")
    ]
    burst(redis_url, store)
    for name, job_id in jobs.items():
        with pytest.raises(JobFailed, match=BAD_PAYLOADS[name][1]):
            producer.ticket(job_id).result(timeout_s=1)
    for job, line in (
        (pickled, "PayloadRefused: .*pickle"),
        (unknown, "PayloadRefused: .*os.system"),
        (callback, "PayloadRefused: .*on_success"),
        (huge, "RequestTooLarge"),
    ):
        with pytest.raises(JobFailed, match=line) as caught:
            producer.ticket(job.id).result(timeout_s=1)
        assert "\n" not in caught.value.reason
    assert all(ticket.result(timeout_s=1).usage.completion_tokens == 3 for ticket in good)
    found = registries(connection)
    assert found["queued"] == found["started"] == []
    assert "junk" in found["failed"]
    assert not list(store.parent.rglob("passwd"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--redis", "redis://:secret@127.0.0.1:1/0"], "RedisUnavailable: no Redis at redis://:[*]{3}@127.0.0.1:1/0"),
        (["--queues", "a,,b"], "queues"),
        (["--max-batch", "0"], "--max-batch"),
        (["--metrics-port", "{taken}"], r"--metrics-port \d+: Address already in use"),
    ],
)
def test_a_worker_that_cannot_start_gives_the_reason_in_one_line(redis_url, store, arguments, message):
    arguments = [word.format(taken=urlsplit(redis_url).port) for word in arguments]
    with running_worker(redis_url, store, *arguments) as worker:
        assert worker.wait() != 0
        last_line = worker.log.strip().splitlines()[-1]
        assert re.search(message, last_line), worker.log
        assert "Traceback" not in worker.log
        assert "secret" not in worker.log


LOADING_WORKER = """
import atexit, os, sys, time
from stoker_worker.cli.main import main
from stoker_worker.engine.scripted import ScriptedProvider

def load(self):
    atexit.register(os.abort)  # as MLX does when Python ends under a thread that is in it
    print("loading", flush=True, file=sys.stderr)
    time.sleep(600)

ScriptedProvider.load = load
main()
"""


def test_a_stop_while_the_model_loads_is_a_clean_one(redis_url, connection, tmp_path):
    (tmp_path / "loading_worker.py").write_text(LOADING_WORKER)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ["--redis", redis_url, "--store", str(tmp_path / "store"), "--engine", "scripted"]
    worker = WorkerProcess(options, tmp_path / "log", {"PYTHONPATH": path}, program=["loading_worker"])
    try:
        worker.wait_for(lambda: "loading\n" in worker.log)
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0, worker.log
    finally:
        worker.kill()
    assert not connection.exists(f"stoker:holder:{store_name(tmp_path / 'store')}"), worker.log
