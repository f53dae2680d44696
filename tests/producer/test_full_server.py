"""A server that has reached its `maxmemory`: a batch's answers must leave it, for nothing else makes room."""

import threading

import pytest
from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError
from tests.producer.batch.test_commands import texts, write
from tests.producer.played_worker import PlayedWorker
from tests.support.private_server import private_server
from tests.support.wait import wait_for

from stoker import Producer
from stoker.batch.record import BatchHeld, forget, hold
from stoker.cli import main as cli_main
from stoker.operations import run

pytestmark = pytest.mark.server


def test_answers_leave_a_server_that_is_full(full_server, tmp_path):
    admin = full_server(n_lines=20)
    of_answers = sum(admin.memory_usage(key, samples=0) for key in keys_of_jobs(admin))
    admin.config_set("maxmemory", counted_memory(admin) - of_answers // 2)
    with pytest.raises(OutOfMemoryError):
        admin.set("a", "b")
    [done] = in_time(fetching(tmp_path))
    assert done == 0
    assert len(texts(tmp_path)) == 20
    assert n_taken(admin) == 20
    assert not keys_of_jobs(admin)
    admin.set("a", "b")


def test_a_server_that_stays_full_loses_all_answers_that_are_ready_and_counts_them_later(full_server, tmp_path):
    """More than one page of them, beside bad lines: what cannot be counted yet must not keep the rest in there."""
    admin = full_server(n_lines=130, n_bad=3)
    admin.config_set("maxmemory", 1)
    fetch = fetching(tmp_path)
    wait_for(lambda: not keys_of_jobs(admin) and not list(admin.scan_iter("stoker:batch:*:bad")), 20)
    assert len(texts(tmp_path)) == 133
    assert n_taken(admin) == 0
    admin.config_set("maxmemory", 0)
    assert in_time(fetch) == [3]  # some lines are bad
    assert len(texts(tmp_path)) == 133
    assert n_taken(admin) == 133
    assert not list(admin.scan_iter("stoker:batch:*:lines"))


def test_a_hold_lasts_and_a_batch_can_be_forgotten_on_a_server_that_is_full(full_server):
    admin = full_server(n_lines=1)
    key = record_of(admin)
    batch = key.removeprefix("stoker:batch:")
    run(admin, hold(batch, "here 1:2 /out.jsonl"))
    admin.expire(f"{key}:holder", 2)
    admin.config_set("maxmemory", 1)
    run(admin, hold(batch, "here 1:2 /out.jsonl"))
    assert admin.ttl(f"{key}:holder") > 2
    with pytest.raises(BatchHeld):
        run(admin, hold(batch, "here 3:4 /other.jsonl"))
    run(admin, forget(batch))
    assert list(admin.scan_iter("stoker:batch:*")) == [f"{key}:holder".encode()]


def test_a_server_that_is_full_still_tells_how_a_job_is(full_server, tmp_path):
    admin = full_server(n_lines=1)
    [job] = admin.scan_iter("rq:job:*")
    admin.config_set("maxmemory", 1)
    with Producer(url(tmp_path)) as producer:
        ticket = producer.ticket(job.decode().removeprefix("rq:job:"))
        assert ticket.status().state == "finished"
        assert ticket.result(timeout_s=5).text.startswith("say 0")


@pytest.fixture(params=[False, True], ids=["as-it-is", "as-redis-7.0"])
def full_server(request, tmp_path, monkeypatch):
    """Makes a batch whose answers are all ready, on a server of its own; returns the administrator's connection.

    Redis 7.0 refuses every transaction while it is full, also one that only deletes; Valkey does not.
    """
    with private_server(tmp_path / "redis") as admin:
        if request.param:
            refuse_transactions_while_full(admin, monkeypatch)

        def answered_batch(n_lines, n_bad=0):
            monkeypatch.chdir(tmp_path)
            prompts = [f"say {number}" for number in range(n_lines)]
            write(tmp_path, [*prompts, *[["not", "a", "prompt"]] * n_bad])
            assert command("--redis", url(tmp_path), "batch", "submit", "in.jsonl", "--name", "full") == 0
            played = PlayedWorker(admin)
            for prompt, job_id in zip(prompts, admin.lrange("rq:queue:generate", 0, -1), strict=True):
                played.finish(job_id.decode(), text=prompt * 10_000)
            return admin

        yield answered_batch


def refuse_transactions_while_full(admin, monkeypatch):
    execute = Pipeline.execute

    def refusing(pipeline, raise_on_error=True):
        limit = admin.info("memory")["maxmemory"]
        if pipeline.transaction and len(pipeline) and 0 < limit < counted_memory(admin):
            pipeline.reset()
            raise OutOfMemoryError("Command # 1 of pipeline caused error: command not allowed")
        return execute(pipeline, raise_on_error)

    monkeypatch.setattr(Pipeline, "execute", refusing)


def counted_memory(admin):
    """What the server compares with `maxmemory`: without its buffer for the append-only file."""
    memory = admin.info("memory")
    return memory["used_memory"] - memory["mem_not_counted_for_evict"]


def url(folder):
    return f"unix://{folder / 'redis' / 'admin.sock'}"


def fetching(folder):
    """`batch fetch` in a thread, and the list that gets its exit code."""
    done = []
    arguments = ("--redis", url(folder), "batch", "fetch", "full", "--out", "out.jsonl")
    thread = threading.Thread(target=lambda: done.append(command(*arguments)), daemon=True)
    thread.start()
    return thread, done


def in_time(fetch):
    thread, done = fetch
    thread.join(20)
    return done


def record_of(admin):
    return next(admin.scan_iter("stoker:batch:full-????????????????")).decode()


def n_taken(admin):
    return int(admin.hget(record_of(admin), "n_taken") or 0)


def keys_of_jobs(admin):
    return [key for pattern in ("rq:job:*", "rq:results:*") for key in admin.scan_iter(pattern)]


def command(*arguments):
    with pytest.raises(SystemExit) as left:
        cli_main(list(arguments))
    return left.value.code
