"""The whole at one moment: the time that is left, dead workers, the jobs that have run the longest; and its command."""

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from rq.utils import utcformat
from tests.producer import played_worker
from tests.producer.played_worker import WORKER, PlayedWorker

from stoker import AsyncProducer, operations, status_command
from stoker_shared.errors import RedisUnavailable
from stoker_shared.wire import LEASE_KEY, MEMBERS_KEY, SERVED_KEY, WORKER_KEY

pytestmark = pytest.mark.server


def publish(connection, name, *queues, jobs_per_min=30.0, **record):
    """As a worker that serves jobs."""
    now = {"at": time.time(), "tokens_per_s": 12.5, "jobs_per_min": jobs_per_min, "in_flight": 3, "in_batch": 2}
    now |= {"hit_share": 0.456, "done": 7, "failed": 1, "of a later release": 1}
    played_worker.publish(connection, name, *queues, **{"max_batch": 4, "now": now, **record})


def start(connection, producer, *, ago_s, tokens):
    job_id = producer.submit(prompt="x").job_id
    PlayedWorker(connection).start(job_id, tokens)
    connection.zadd("rq:wip:generate", {f"{job_id}:e": 2e9})
    connection.hset(f"rq:job:{job_id}", "started_at", utcformat(datetime.now(UTC) - timedelta(seconds=ago_s)))
    return job_id


def test_the_time_left_counts_what_the_workers_prefer(producer, connection):
    publish(connection, "stoker-a", "urgent", "generate")
    producer.submit_many([{"prompt": "x"}] * 10)
    producer.submit_many([{"prompt": "x"}] * 5, queue="urgent")
    producer.submit(prompt="x", queue="nobody")
    queues = {queue.name: queue for queue in producer.overview().queues}
    assert queues["urgent"].left_s == 10
    assert queues["generate"].left_s == 30
    assert queues["nobody"].left_s is None
    publish(connection, "stoker-b", "generate")
    assert {queue.name: queue.left_s for queue in producer.overview().queues}["generate"] == 15


def test_lost_data_and_a_suspension_come_first(connection, stoker):
    figures: dict[str, object] = {"at": time.time(), "hit_share": None}
    figures |= dict.fromkeys(("tokens_per_s", "jobs_per_min", "in_flight", "in_batch", "done", "failed"), 0)
    loss = {"times": 1, "jobs": 3, "ago_s": 130.0}
    publish(connection, "stoker-mac", "generate", now={**figures, "suspended": True, "data_loss": loss})
    publish(connection, "stoker-mini", "generate", now=figures)
    lost, suspended = stoker("status")[1].splitlines()[:2]
    assert lost.startswith("Redis lost data 2 min ago")
    assert lost.endswith("stoker-mac: once, 3 jobs in flight.")
    assert "rq resume" in suspended
    assert json.loads(stoker("status", "--json")[1])["workers"][0]["live"]["now"]["data_loss"]["jobs"] == 3


def test_a_workers_record_that_is_garbage_breaks_neither_status_nor_submit(producer, connection, stoker):
    garbage: list[dict[str, object]] = [{"queues": queues} for queues in ([{}], [1], ["\ud800"])]
    garbage += [{"model": ["m"]}, {"host": None}, {"pid": "x"}, {"now": {"at": 1, "tokens_per_s": "x"}}]
    for record in garbage:
        publish(connection, "stoker-mac", "generate", **record)
        connection.delete(SERVED_KEY.format(queue="generate"))
        producer.submit(prompt="x")
        code, out, _ = stoker("status")
        assert (code, "stoker-mac" in out) == (0, True), record


def test_garbage_that_is_no_number_or_no_json_breaks_no_status(producer, connection, stoker):
    job_id = start(connection, producer, ago_s=9, tokens=3)
    connection.set(WORKER_KEY.format(name="stoker-mac"), "[" * 100_000)
    connection.sadd("rq:workers", "rq:worker:stoker-mac")
    connection.hset(MEMBERS_KEY, "m", "{}")
    leases = ('{"worker": "w", "queues": ["q"], "fence": 1e999}', "[" * 100_000, "7")
    progress = ('{"tokens": 1e999, "stage": "x", "tokens_per_s": 1}', "[" * 100_000, "7")
    for lease, meta in zip(leases, progress, strict=True):
        connection.set(LEASE_KEY.format(member="m"), lease)
        connection.hset(f"rq:job:{job_id}", "meta", f'{{"progress": {meta}}}')
        assert stoker("status")[0] == stoker("status", job_id)[0] == 0


def test_a_dead_worker_is_shown_as_such_with_the_jobs_it_left(producer, connection, stoker):
    job_id = start(connection, producer, ago_s=90, tokens=3)
    connection.hset(f"rq:job:{start(connection, producer, ago_s=9, tokens=3)}", "worker_name", "another of RQ's")
    publish(connection, "stoker-mac-1", "generate")
    connection.sadd("rq:workers", "rq:worker:stoker-mac-2", "rq:worker:another of RQ's")
    workers = {worker.name: worker.is_alive for worker in producer.overview().workers}
    assert workers == {"stoker-mac-1": True, "stoker-mac-2": False, WORKER: False}
    code, text, _ = stoker("status")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["stoker-mac-2"][1] == "DEAD"
    assert " ".join(lines["stoker-mac-1"][1:]) == "serving mac generate #5 m 12.5 30 2/4 46% 7 1 0"
    assert lines[job_id][1:] == ["generate", WORKER, "90", "s", "decode", "3", "8.5"]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"aof_last_write_status": "err"}, "Redis cannot write its append-only file"),
        ({"rdb_last_bgsave_status": "err"}, "Redis could not save its last snapshot"),
        ({"maxmemory": 9, "used_memory": 9, "maxmemory_policy": "noeviction"}, "Redis is full"),
    ],
)
def test_a_server_that_refuses_to_write_is_the_first_line(producer, stoker, monkeypatch, found, why):
    assert producer.overview().trouble is None
    answer_to = operations.answer_to

    async def answered(connection, step):
        replies = await answer_to(connection, step)
        return [
            reply | found if asked[0] == "INFO" else reply for asked, reply in zip(step.commands, replies, strict=True)
        ]

    monkeypatch.setattr(operations, "answer_to", answered)
    assert why in stoker("status")[1].splitlines()[0]


def test_the_jobs_shown_are_those_that_have_run_the_longest(producer, connection, stoker):
    jobs = [start(connection, producer, ago_s=10 * n, tokens=n) for n in range(1, 13)]
    shown = json.loads(stoker("status", "--json")[1])["slowest"]
    assert [job["job_id"] for job in shown] == jobs[:1:-1]
    assert shown[0]["progress"] == {"stage": "decode", "tokens": 12, "tokens_per_s": 8.5}


def test_an_empty_server_has_an_overview_too(producer, redis_url, stoker):
    assert stoker("status")[1] == "no queues\n\nno workers\n"

    async def look():
        async with AsyncProducer(redis_url) as other:
            return await other.overview()

    assert asyncio.run(look()) == producer.overview()


def test_watch_goes_on_when_redis_was_away(producer, stoker, monkeypatch):
    states = iter([producer.overview(), RedisUnavailable("Redis is away"), producer.overview(), KeyboardInterrupt()])

    def next_state(self):
        state = next(states)
        if isinstance(state, BaseException):
            raise state
        return state

    monkeypatch.setattr("stoker.producer.Producer.overview", next_state)
    monkeypatch.setattr(status_command, "EVERY_S", 0)
    code, text, _ = stoker("status", "--watch")
    assert code == 0
    shown = [line for line in text.splitlines() if line in ("no queues", "Redis is away")]
    assert shown == ["no queues", "Redis is away", "no queues"]


def test_watch_takes_neither_a_job_nor_json(stoker):
    assert [stoker("status", "--watch", other)[0] for other in ("job", "--json")] == [2, 2]


def test_where_one_worker_has_a_shared_store_each_has_a_line_about_it(connection, stoker):
    now = {"at": 1.0, "tokens_per_s": 1.0, "jobs_per_min": 1.0, "in_flight": 0, "in_batch": 0, "hit_share": None}
    now |= {"done": 0, "failed": 0, "moved_in": 0}
    for name, shared in {"mac1": {"away_s": 0.0}, "mac2": {"away_s": 75.5}, "mac3": None}.items():
        publish(connection, f"stoker-{name}", "generate", now={**now, "shared_store": shared})
    _, text, _ = stoker("status")
    _, _, table = text.partition("SHARED STORE")
    assert [line.split() for line in table.splitlines()[1:4]] == [
        ["stoker-mac1", "answers"],
        ["stoker-mac2", "away", "for", "76", "s"],
        ["stoker-mac3", "none"],
    ]
