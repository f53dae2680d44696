"""Whatever a job's hash holds, the job ends in one registry or is dropped, and other jobs finish."""

import itertools
import json
import logging
import time
import zlib

import pytest
from redis.exceptions import RedisError
from rq import RateLimit, Repeat, Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.webhook import Webhook
from tests.worker.queue.ends import give_back

from stoker import JobFailed
from stoker_shared.errors import OwnershipLost, RedisUnavailable
from stoker_shared.wire import TASK_PATH
from stoker_worker.metrics.counters import Metrics
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

RESULT = {"text": "y", "cache": {"agent_version": 1, "saved": True}}
REGISTRIES = ("finished", "failed", "canceled", "deferred", "scheduled", "ready")

NUMBERS = (
    "timeout", "result_ttl", "failure_ttl", "ttl", "number_of_retries", "retries_left", "repeats_left",
    "rate_limit_concurrency", "allow_dependency_failures", "enqueue_at_front", "enqueue_at_front_on_retry",
    "success_callback_timeout", "failure_callback_timeout", "stopped_callback_timeout",
)  # fmt: skip
TIMES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
LISTS = ("dependency_ids", "retry_intervals", "repeat_intervals", "webhooks")
TEXTS = (
    "origin", "status", "worker_name", "description", "group_id", "rate_limit_key", "dependency_id", "exc_info",
    "result", "meta", "success_callback_name", "failure_callback_name", "stopped_callback_name", "data",
)  # fmt: skip
OURS = ("stoker_attempts", "stoker_lost_alone", "stoker_agent", "stoker_saving", "stoker_tried", "stoker_stream")
FIELDS = (*NUMBERS, *TIMES, *LISTS, *TEXTS, *OURS)
VALUES = (
    b"", b"5", b"-7", b"0", b"true", b"null", b"1.5", b"1e300", b"nan", b"[]", b"{}", b"[5]", b'["a", 5]', b"[[]]",
    b'["\\ud800"]', b"text", b"\xff\xfe", b"\x00", b"9" * 5000, b"9" * 17, b"[" * 20_000, zlib.compress(b"\xff" * 99),
    b"0001-01-01T00:00:00Z", b"9999-12-31T23:59:59.999999+14:00", b"[-1]", b"[1e400]", b"x" * 300_000,
)  # fmt: skip


@pytest.fixture
def enqueue(enqueue_by_hand):
    return enqueue_by_hand


def play(queue, connection, *, rounds=100, fails=()):
    """Run the queue's jobs as a worker does, until none waits; returns the ids that finished.

    Args:
        fails: ids of jobs whose prompt is at fault.
    """
    finished = []
    for _ in range(rounds):
        try:
            claimed = queue.claim(16, Busy())
        except RedisUnavailable:
            continue
        for job in claimed:
            try:
                if job.job_id in fails:
                    raise ValueError("as asked")
                job.finish(RESULT)
                finished.append(job.job_id)
            except OwnershipLost:
                job.drop()
            except Exception as error:
                job.fail(error, may_retry=False)
            job.release()
        if not claimed and not connection.llen("rq:queue:generate"):
            break
    return finished


def check_that_all_ended(connection, job_ids):
    assert connection.llen("rq:queue:generate") == connection.zcard("rq:wip:generate") == 0
    for job_id in job_ids:
        is_gone = connection.type(f"rq:job:{job_id}") != b"hash"
        scores = {name: connection.zscore(f"rq:{name}:generate", job_id) for name in REGISTRIES}
        # A result that is kept for seconds may have expired by now; RQ removes the entry later.
        found = [name for name, at in scores.items() if at is not None and not (is_gone and at <= time.time())]
        assert len(found) == (0 if is_gone else 1), (job_id, found, connection.hgetall(f"rq:job:{job_id}"))


def test_any_value_in_any_field_costs_one_job_and_no_other(connection, queue, enqueue, caplog):
    bad, good = ["bad-no-data"], []
    enqueue("bad-no-data", data=None)
    for number, name in enumerate(FIELDS):
        for value in {*VALUES[number % 13 :: 13], b"5" if name in LISTS else b"x"}:
            bad.append(f"bad-{len(bad)}")
            enqueue(bad[-1], **{name: value})
        good.append(f"good-{name}")
        enqueue(good[-1])
    finished = play(queue, connection, rounds=3 * len(bad))
    assert set(good) <= set(finished)
    check_that_all_ended(connection, [*bad, *good])
    assert sum(len(record.getMessage()) for record in caplog.records) < 1000 * len(bad)


@pytest.mark.parametrize("name", ["junk", "data", "meta", "created_at", "stoker_tried", "description"])
def test_a_field_of_many_megabytes_is_not_read(connection, queue, enqueue, name):
    enqueue("bad", **{name: b"[" + bytes(20_000_000) + b"]"})
    enqueue("good")
    before = connection.info("stats")["total_net_output_bytes"]
    finished = play(queue, connection)
    assert connection.info("stats")["total_net_output_bytes"] - before < 2**20
    assert set(finished) == ({"good", "bad"} if name == "junk" else {"good"})
    check_that_all_ended(connection, ["bad", "good"])


@pytest.mark.parametrize(("name", "value"), [("retry_intervals", "5"), ("timeout", "1e300"), ("failure_ttl", "9" * 17)])
def test_the_reason_names_the_field_and_a_retry_is_not_used_for_it(connection, queue, producer, enqueue, name, value):
    enqueue("bad", **{name: value, "retries_left": 3})
    assert play(queue, connection) == []
    with pytest.raises(JobFailed, match=f"PayloadRefused: the job's hash is malformed: {name}"):
        producer.ticket("bad").result(timeout_s=1)


@pytest.mark.parametrize("ends", ["finishes", "fails"])
def test_a_key_of_another_type_beside_the_hash_costs_that_job_only(connection, queue, enqueue, ends):
    keys = "rq:job:{}:dependents", "rq:executions:{}", "rq:results:{}", "stoker:stream:{}", "rq:job::{}:dependencies"
    writes = connection.set, connection.rpush, connection.sadd
    bad = [f"bad-{n}" for n in range(len(keys) * len(writes))]
    for job_id, (key, write) in zip(bad, itertools.product(keys, writes), strict=True):
        enqueue(job_id, retries_left=2, stoker_stream="x")
        write(key.format(job_id), b"\xff")
    enqueue("good")
    finished = play(queue, connection, fails=() if ends == "finishes" else bad)
    assert "good" in finished
    check_that_all_ended(connection, [*bad, "good"])


def test_a_job_whose_key_is_no_hash_is_dropped_with_a_line(connection, queue, enqueue, caplog):
    caplog.set_level(logging.INFO)
    connection.set("rq:job:bad-string", "x")
    connection.rpush("rq:job:bad-list", "x")
    bad = ["bad-string", "bad-list", "bad-none", b"bad-\xff"]
    connection.rpush("rq:queue:generate", *bad)
    enqueue("good")
    assert play(queue, connection) == ["good"]
    assert connection.llen("rq:queue:generate") == 0
    for name in ("bad-string", "bad-list", "bad-none", r"bad-\udcff"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1


def test_jobs_that_are_refused_when_they_are_claimed_count_as_failed_and_dropped_ids_do_not(
    connection, redis_url, enqueue
):
    metrics = Metrics()
    enqueue("bad.id")
    enqueue("bad-request", data='["stoker_shared.task.generate", null, [], {"request": {"most_tokens": 4}}]')
    enqueue("bad-field", retry_intervals="{}")
    enqueue("good")
    connection.rpush("rq:queue:generate", "no-job")
    settings = read_settings({"redis_url": redis_url, "lease_ttl_s": 30})
    with open_queue(settings, redis_url, metrics=metrics) as opened:
        assert play(opened.rq_queue, connection) == ["good"]
    failed = {job_id.decode() for job_id in connection.zrange("rq:failed:generate", 0, -1)}
    assert failed == {"bad.id", "bad-request", "bad-field"}
    assert metrics.ended_jobs()["failed"] == 3


@pytest.mark.parametrize("key", ["rq:job:{}", "rq:executions:{}"])
def test_a_key_that_changes_its_type_while_the_job_runs_keeps_no_other_without_a_heartbeat(
    connection, queue, enqueue, key
):
    for job_id in ("bad", "good"):
        enqueue(job_id)
    claimed = {job.job_id: job for job in queue.claim(2, Busy())}
    connection.delete(key.format("bad"))
    connection.rpush(key.format("bad"), "x")
    connection.hset(claimed["good"].run.execution.key, "last_heartbeat", "0")
    assert queue.beat()
    assert connection.hget(claimed["good"].run.execution.key, "last_heartbeat") != b"0"


SETUSER = "ACL SETUSER default"


@pytest.mark.parametrize(
    ("refuse", "allow", "error"),
    [
        (f"{SETUSER} -memory", f"{SETUSER} +memory", RedisError),
        (f"{SETUSER} -zadd", f"{SETUSER} +zadd", RedisError),
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", RedisUnavailable),
    ],
)
def test_a_server_that_refuses_commands_or_has_no_memory_fails_no_job(connection, queue, enqueue, refuse, allow, error):
    enqueue("good")
    connection.execute_command(*refuse.split())
    try:
        with pytest.raises(error):
            queue.claim(8, Busy())
    finally:
        connection.execute_command(*allow.split())
    assert play(queue, connection) == ["good"]


@pytest.mark.parametrize("value", ["-1000000", "inf", "nan", "1.5", "x", "9" * 5000, "0x7f"])
def test_no_count_in_the_hash_lets_a_job_outlive_three_lost_workers(queue, enqueue, value):
    enqueue("bad", stoker_attempts=value, stoker_lost_alone=value)
    for _ in range(3):
        give_back(queue.claim(1, Busy()), counts_as_attempt=True, alone=True)
    [job] = queue.claim(1, Busy())
    assert (job.attempt, job.losses_alone) == (4, 3)
    job.release()


def test_commands_that_the_worker_ignores_do_not_fill_its_log(queue, caplog):
    registration = queue._registration
    for payload in ("shutdown", "no JSON", '{"command": "\u001b[2J"}', "[]", '{"command": "kill-horse"}') * 200:
        data = json.dumps({"command": payload}) if payload == "shutdown" else payload
        registration.handle_payload({"data": data.encode()})
    [line] = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert "shutdown" in line


def test_jobs_with_a_webhook_or_repeats_are_refused_and_nothing_is_sent(connection, plain, queue, monkeypatch):
    sent = []
    monkeypatch.setattr(Webhook, "send", lambda *args, **options: sent.append(args))
    for named, options in (
        ("webhooks", {"webhooks": [Webhook("http://127.0.0.1:9/", "failed")]}),
        ("repeats", {"repeat": Repeat(times=2, interval=0), "retry": Retry(1)}),
        ("repeats", {"repeat": Repeat(times=2, interval=60), "retry": Retry(1)}),
    ):
        job = plain.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": "x"}, **options)
        assert queue.claim(1, Busy()) == []
        assert named in str(Job.fetch(job.id, connection, JSONSerializer).latest_result().exc_string)
    assert sent == []
    assert connection.zcard("rq:scheduled:generate") == connection.llen("rq:queue:generate") == 0


@pytest.mark.parametrize("damage", [None, "rq:rl:key:allowed", "concurrency"])
def test_jobs_with_a_rate_limit_are_refused_and_so_are_those_that_it_holds_back(connection, plain, queue, damage):
    request, limit = {"agent_id": "a", "prompt": "x"}, RateLimit("key", 1)
    jobs = [plain.enqueue(TASK_PATH, request=request, rate_limit=limit, retry=Retry(1)) for _ in range(3)]
    if damage == "concurrency":
        connection.hset("rq:rl:key", "concurrency", "no number")
    elif damage:
        connection.delete(damage)
        connection.set(damage, "of another type")
    for _ in jobs:
        assert queue.claim(8, Busy()) == []
    for job in jobs[: 1 if damage else 3]:
        assert "rate limits" in str(Job.fetch(job.id, connection, JSONSerializer).latest_result().exc_string)
