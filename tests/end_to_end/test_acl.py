"""The three users of docker/users.acl on a real server: each may do everything its role needs, and no more."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry
from rq import Queue
from rq import Retry as JobRetry
from rq.command import send_shutdown_command, send_stop_execution_command
from rq.exceptions import DuplicateJobError
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker_registration import get_keys
from tests.support.dashboard_process import require_dashboard, running_dashboard
from tests.support.private_server import acl_refusals, private_server
from tests.support.worker_process import SHORT, burst, running_worker

from stoker import AsyncProducer, JobCanceled, JobFailed, Producer
from stoker.cli import main
from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server

NAMES = ("stoker-producer", "stoker-worker", "stoker-operator")
USERS = Path(__file__).resolve().parents[2] / "docker" / "users.acl"
SECURITY = USERS.parents[1] / "docs" / "security.md"
[RECOMMENDED] = re.findall(r"^stoker-worker run (.*) --model \.\.\.$", SECURITY.read_text(), re.MULTILINE)
RECOMMENDED = RECOMMENDED.split()
SLOW = ("--scripted-steps-per-s", "50")


@pytest.fixture
def admin(tmp_path):
    with private_server(tmp_path / "redis", "--aclfile", str(USERS)) as admin:
        for user in NAMES:
            admin.execute_command("ACL", "SETUSER", user, f">{user}-pw")
        yield admin
        assert acl_refusals(admin) == [], "each test here does what a role may do"


@pytest.fixture
def url(admin):
    """The URLs by user, each with its own password."""
    port = int(admin.config_get("port")["port"] or 0)
    return lambda user: f"redis://{user}:{user}-pw@127.0.0.1:{port}"


@pytest.fixture
def producer(url):
    with Producer(url("stoker-producer")) as producer:
        yield producer


def long_job(producer, agent_id):
    return producer.submit(agent_id=agent_id, prompt="x", max_tokens=100_000)


def runs(ticket):
    return lambda: ticket.status().state == "started"


def ended_as(error, ticket):
    with pytest.raises(error):
        ticket.result(timeout_s=30)


async def with_asyncio(url):
    async with AsyncProducer(url) as producer:
        first = await producer.submit(agent_id="y", prompt="x", max_tokens=4, retry=1)
        second = await producer.submit(agent_id="z", prompt="x", max_tokens=4, depends_on=first, job_id="z")
        return await producer.results([second, first], timeout_s=30)


def canceled_while_waited_for(producer):
    """Cancel many jobs while `as_completed` waits for them."""
    gate = producer.submit(agent_id="gate", prompt="x", max_tokens=100_000)
    tickets = producer.submit_many([{"agent_id": "w", "prompt": "x"}] * 10, depends_on=gate)
    coming = producer.as_completed([*tickets, producer.submit(agent_id="q", prompt="x", max_tokens=4)], timeout_s=30)
    next(coming)
    for ticket in tickets:
        assert ticket.cancel()
    assert set(coming) == set(tickets)
    assert gate.cancel()


def test_jobs_of_both_kinds_of_producer_end_in_every_way_without_one_refusal(admin, url, producer, store):
    producer.ping()
    canceled = producer.submit(agent_id="a", prompt="x")
    assert canceled.cancel()
    requests = [{"agent_id": f"a{n}", "prompt": "x", "max_tokens": 4} for n in range(3)]
    tickets = [*producer.submit_many(requests), producer.submit(agent_id="f", prompt="x", at_front=True, ttl_s=600)]
    for _ in range(2):
        tickets.append(producer.submit(**requests[0], job_id="again"))
    assert tickets[0].status().position == 1
    assert "no worker listens" in tickets[0].status().warning
    with Redis.from_url(url("stoker-producer")) as connection:
        queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        stock = queue.enqueue(TASK_PATH, request={"agent_id": "s", "prompt": "x", "max_tokens": 4})
        broken = {"agent_id": "b", "prompt": "fail because", "max_tokens": 4}
        retried = queue.enqueue(TASK_PATH, request=broken, retry=JobRetry(max=1))
        waits, never = (
            queue.enqueue(TASK_PATH, request={"agent_id": name, "prompt": "x", "max_tokens": 4}, depends_on=stock)
            for name in ("waits", "never")
        )
    assert producer.ticket(never.id).cancel()
    tickets += [producer.ticket(stock.id), producer.ticket(waits.id)]
    with running_worker(url("stoker-worker"), store, *SLOW, *RECOMMENDED, env=SHORT) as worker:
        assert all(ticket.result(timeout_s=30).usage.completion_tokens for ticket in tickets)
        with Redis.from_url(url("stoker-operator")) as connection:
            send_shutdown_command(connection, producer.workers()[0].name)
        worker.wait_for(lambda: "command ignored: 'shutdown'" in worker.log)
        assert asyncio.run(with_asyncio(url("stoker-producer")))
        canceled_while_waited_for(producer)
        ended_as(JobFailed, producer.ticket(retried.id))
        ended_as(JobFailed, producer.submit(agent_id="t", prompt="x", max_tokens=100_000, job_timeout_s=1))
        ended_as(JobCanceled, canceled)
        assert [shown.pid for shown in producer.workers()] == [worker.pid]
        running = long_job(producer, "a")
        worker.wait_for(runs(running))
        assert next(running.stream(timeout_s=30)).text
        worker.wait_for(lambda: running.status().tokens)
        assert [job.job_id for job in producer.overview().slowest] == [running.job_id]
        assert running.cancel()
        ended_as(JobCanceled, running)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert [queue.waiting for queue in producer.queues()] == [0]
    assert admin.zcard("rq:wip:generate") == admin.llen("rq:queue:generate") == 0


def test_checked_jobs_go_on_and_count_without_one_refusal(admin, url, producer, store, capsys):
    route = [{"model": "scripted", "queue": "generate"}, {"model": "large", "queue": "large"}]
    with running_worker(url("stoker-worker"), store, "--scripted-steps-per-s", "1000", env=SHORT) as worker:
        worker.wait_for(lambda: [shown.model for shown in producer.workers()] == ["scripted"])
        check = {"contains": "yes"}
        checked = producer.submit(prompt="say yes", models="auto", check=check, task="t")
        assert checked.result(timeout_s=30).accepted
        assert checked.feedback(accepted=False)
        rejected = producer.submit(prompt="say no", route=route, check=check, task="t")
        worker.wait_for(lambda: admin.lrange("rq:queue:large", 0, -1) == [rejected.job_id.encode()])
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    for words in (["ls"], ["reset", "--yes"]):
        with pytest.raises(SystemExit) as left:
            main(["--redis", url("stoker-producer"), "trust", *words])
        assert left.value.code == 0
    assert "0 %" in capsys.readouterr().out
    assert not admin.exists("stoker:trust")


def test_scheduled_jobs_work_without_one_refusal(admin, url, producer, store):
    def request(agent_id, prompt="x"):
        return {"request": {"agent_id": agent_id, "prompt": prompt, "max_tokens": 4}}

    with Redis.from_url(url("stoker-producer")) as connection:
        queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        in_a_second, at_front = (
            queue.enqueue_in(timedelta(seconds=1), TASK_PATH, kwargs=request(name), at_front=name == "f")
            for name in "if"
        )
        canceled = queue.enqueue_in(timedelta(hours=1), TASK_PATH, kwargs=request("c"))
        retried = queue.enqueue(TASK_PATH, kwargs=request("r", "fail so"), retry=JobRetry(max=1, interval=1))
        ended_early = queue.enqueue(TASK_PATH, kwargs=request("e"), ttl=1)
    admin.expire(ended_early.key, 0)
    assert producer.ticket(canceled.id).cancel()
    with running_worker(url("stoker-worker"), store, *SLOW, env={**SHORT, "STOKER_GRACE_S": "5"}) as worker:
        for job in (in_a_second, at_front):
            assert producer.ticket(job.id).result(timeout_s=30)
        worker.wait_for(lambda: admin.hget(retried.key, "status") == b"failed")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log


def test_a_producer_that_uses_unique_ids_needs_exactly_the_rights_on_the_page(admin, url, store):
    added = re.search(r"`unique=True` is a script.*?`(\+[^`]*)`", SECURITY.read_text(), re.DOTALL)
    assert added
    request = {"request": {"agent_id": "a", "prompt": "x", "max_tokens": 4}}
    with Redis.from_url(url("stoker-producer")) as connection:
        queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        with pytest.raises(NoPermissionError):
            queue.enqueue(TASK_PATH, kwargs=request, job_id="mine", unique=True)
        admin.acl_log_reset()
        admin.execute_command("ACL", "SETUSER", "stoker-producer", *added[1].split())
        for _ in range(2):
            queue.enqueue(TASK_PATH, kwargs=request, job_id="mine", unique=True)
            queue.enqueue_in(timedelta(seconds=0), TASK_PATH, kwargs=request, job_id="later", unique=True)
            for again in (
                lambda: queue.enqueue(TASK_PATH, kwargs=request, job_id="mine", unique=True),
                lambda: queue.enqueue_in(timedelta(0), TASK_PATH, kwargs=request, job_id="later", unique=True),
            ):
                with pytest.raises(DuplicateJobError):
                    again()
            with running_worker(url("stoker-worker"), store, env=SHORT):
                assert all(Producer(connection).ticket(job_id).result(timeout_s=30) for job_id in ("mine", "later"))
            admin.delete("rq:job:mine", "rq:job:later")
            admin.script_flush()  # like after a restart of the server


def test_operators_commands_reach_the_worker_and_its_jobs_are_given_back_when_it_stops(admin, url, producer, store):
    with running_worker(url("stoker-worker"), store, *SLOW, env=SHORT) as worker:
        stopped, deleted, left = (long_job(producer, name) for name in ("stopped", "deleted", "left"))
        worker.wait_for(lambda: all(runs(ticket)() for ticket in (stopped, deleted, left)))
        registry = StartedJobRegistry("generate", connection=admin)
        executions = dict(entry.decode().split(":") for entry in admin.zrange(registry.key, 0, -1))
        send_stop_execution_command(admin, stopped.job_id, executions[stopped.job_id])
        ended_as(JobCanceled, stopped)
        admin.delete(f"rq:job:{deleted.job_id}")
        worker.wait_for(lambda: admin.zcard(registry.key) == 1)
        [name] = [key.rpartition(":")[2] for key in get_keys(connection=admin)]
        send_shutdown_command(admin, name)
        assert worker.wait() == 0
    assert left.status().state == "queued"


def test_a_standby_takes_over_and_recovers_the_jobs_of_a_killed_worker(admin, url, producer, store):
    address = url("stoker-worker")
    with running_worker(address, store, "--scripted-steps-per-s", "2", env=SHORT) as worker:
        ticket = producer.submit(agent_id="a", prompt="x", max_tokens=100)
        worker.wait_for(runs(ticket))
        with running_worker(address, store, "--standby", "--burst", log_name="standby.log", env=SHORT) as standby:
            standby.wait_for(lambda: "standing by" in standby.log)
            worker.kill()
            assert ticket.result(timeout_s=30).attempt == 2
            assert standby.wait() == 0


def test_rqs_own_tools_and_the_dashboard_run_as_the_operator(admin, url, producer, store, tmp_path):
    require_dashboard()
    address = url("stoker-operator")

    def rq(*arguments):
        command = [sys.executable, "-m", "rq.cli", *arguments, "--url", address]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with running_worker(url("stoker-worker"), store, *SLOW, "--grace-s", "0") as worker:
        failed = producer.submit(agent_id="a", prompt="fail because", max_tokens=4)
        ended_as(JobFailed, failed)
        running = long_job(producer, "b")
        worker.wait_for(runs(running))
        assert "1 executing" in rq("info")
        with Producer(address) as looking:
            assert [queue.workers for queue in looking.queues()] == [tuple(seen.name for seen in looking.workers())]
            assert [seen.leases for seen in looking.overview().workers] == [{"generate": 1}]
        rq("suspend")
        rq("requeue", "--queue", "generate", "--all", "--serializer", "json")
        assert failed.status().state == "queued"
        with running_dashboard(address, tmp_path / "dashboard.log") as page:
            views = ("jobs", "workers", "stoker", f"job/{running.job_id}")
            data = ("queues", f"job/{running.job_id}")
            for path in ("/", *(f"/0/view/{view}" for view in views), *(f"/0/data/{name}.json" for name in data)):
                with urlopen(page + path, timeout=20) as answer:
                    assert answer.status == 200
            for path in (f"/job/{running.job_id}/delete", "/queue/generate/queued/empty"):
                with urlopen(Request(page + path, method="POST"), timeout=20) as answer:
                    assert answer.status == 200
        rq("resume")
        worker.wait_for(lambda: admin.zcard("rq:wip:generate") == 0)


def test_a_producer_sends_follows_cancels_and_fetches_batches_without_one_refusal(admin, url, store, tmp_path, capsys):
    body = {"model": "scripted", "prompt": "say hello", "user": "a"}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(line)}\nno line\n")

    def batch(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["--redis", url("stoker-producer"), "batch", *map(str, arguments)])
        out, err = capsys.readouterr()
        return left.value.code, out + err

    for name in ("fetched", "canceled"):
        assert batch("submit", tmp_path / "in.jsonl", "--any-model", "--name", name)[0] == 0
    assert batch("cancel", "canceled", "--forget")[0] == 0
    with running_worker(url("stoker-worker"), store, env=SHORT):
        for arguments in (("fetch", "fetched", "--follow"), ("run", tmp_path / "in.jsonl")):
            code, text = batch(*arguments, "--out", tmp_path / f"{arguments[0]}.jsonl")
            assert code == 3, text
    assert "fetched" in batch("ls")[1]
    assert batch("status", "fetched")[0] == 0
    assert not list(admin.scan_iter("rq:job:*"))


def test_a_producer_forgets_an_agent_with_its_jobs_without_one_refusal(admin, url, producer, store, capsys):
    with running_worker(url("stoker-worker"), store, *SLOW, env=SHORT) as worker:
        tickets = [producer.submit(agent_id="a", prompt=prompt, stream=True) for prompt in ("say one", "fail so")]
        tickets[0].result(timeout_s=30)
        ended_as(JobFailed, tickets[1])
        others = producer.submit(agent_id="b", prompt="say one")
        others.result(timeout_s=30)
        with pytest.raises(SystemExit):
            main(["--redis", url("stoker-producer"), "agent", "forget", "a", "--yes"])
        assert "Redis still has jobs of it: 2 ended" in capsys.readouterr().out
        tickets.append(long_job(producer, "a"))
        worker.wait_for(runs(tickets[2]))
        assert producer.agents.jobs("a", remove=True).removed == 3
        worker.wait_for(lambda: not admin.exists("rq:wip:generate"))
        with pytest.raises(SystemExit):
            main(["--redis", url("stoker-producer"), "agent", "forget", "a", "--yes", "--jobs"])
        assert "there is no agent 'a'\nremoved 0 of its jobs from Redis" in capsys.readouterr().out
        assert others.result(timeout_s=0).text == "one"
    assert not [key for ticket in tickets for key in admin.scan_iter(f"*{ticket.job_id}*")]


TRIED = {
    "read every job": "HGETALL rq:job:j, LRANGE rq:queue:generate 0 -1, ZRANGE rq:wip:generate 0 -1, "
    "ZRANGE rq:failed:generate 0 -1, SMEMBERS rq:workers, PTTL rq:job:j",
    "read every result": "XREVRANGE rq:results:j + -",
    "read texts": "XREAD STREAMS stoker:stream:j 0",
    "read which workers serve": "MGET stoker:worker:w, HGETALL stoker:members, "
    "MGET stoker:lease:generate stoker:holder:mac",
    "enqueue;": "SADD rq:queues rq:queue:q, RPUSH rq:queue:q j, LPUSH rq:queue:q k, LREM rq:queue:q 0 j",
    "write and delete any job": "HSET rq:job:j status queued, EXPIRE rq:job:j 60, DEL rq:job:j",
    "put jobs among the canceled": "ZADD rq:canceled:q 1 j, ZADD rq:deferred:q 1 j, ZADD rq:scheduled:q 1 j, "
    "ZREM rq:canceled:q j, ZREM rq:deferred:q j, ZREM rq:scheduled:q j",
    "take jobs out": "ZREM rq:finished:q j, ZREM rq:failed:q j, DEL rq:results:j",
    "delete texts as": "DEL stoker:stream:j",
    "send commands": "PUBLISH rq:pubsub:w {}",
    "write batches": "HSET stoker:batch:b n 1, ZADD stoker:serve:s 1 j, HSET stoker:trust t 1",
    "write results": "XADD rq:results:j * type 1, EXPIRE rq:results:j 1, ZADD rq:finished:q 1 j, ZADD rq:failed:q 1 j, "
    "ZADD rq:wip:q 1 j:e",
    "delete a whole queue": "DEL rq:queue:q, DEL rq:finished:q, SET rq:suspended 1, SADD rq:workers rq:worker:w",
    "run scripts": f"EVALSHA {'0' * 40} 0, SCRIPT LOAD return",
    "write the rest": "SET stoker:lease:q x, SET stoker:worker:w x, SET stoker:holder:m x, SET stoker:batches x, "
    "HSET stoker:members m x, XADD stoker:stream:j * kind end",
    "receive": "SUBSCRIBE rq:pubsub:w",
    "other keys": "HGETALL other, HSET other a 1, DEL other, PUBLISH other x, SELECT 1, FLUSHALL, FLUSHDB, "
    "KEYS *, SCAN 0, EVAL return 0, CONFIG GET requirepass, CONFIG SET dir /, DEBUG SLEEP 0, ACL LIST, MONITOR, "
    "SHUTDOWN, REPLICAOF NO ONE, CLIENT LIST, SORT rq:queues, MOVE rq:queues 1, COPY rq:queues rq:queue:x DB 1, "
    "FUNCTION FLUSH, RANDOMKEY, DBSIZE",
}
ROWS = re.findall(r"^\| (.*) \| (yes|no) \| (yes|no) \| (yes|no) \|$", SECURITY.read_text(), re.MULTILINE)


def test_each_row_of_the_table_is_tried():
    assert [any(row.startswith(begin) for begin in TRIED) for row, *_ in ROWS] == [True] * len(TRIED)


@pytest.mark.parametrize(("row", "rights"), [(row, rights) for row, *rights in ROWS], ids=lambda value: str(value)[:25])
def test_each_user_has_the_rights_of_the_table_and_no_others(shared_admin, row, rights):
    [commands] = [commands for begin, commands in TRIED.items() if row.startswith(begin)]
    port = shared_admin.config_get("port")["port"]
    for user, right in zip(NAMES, rights, strict=True):
        for command in commands.split(", "):
            with Redis.from_url(f"redis://{user}:{user}-pw@127.0.0.1:{port}?protocol=2") as connection:
                assert (user, command, may(connection, command)) == (user, command, right)
        shared_admin.flushall()


def may(connection, command):
    try:
        connection.execute_command(*command.split())
    except NoPermissionError:
        return "no"
    except ResponseError:  # it may run a script, and there is none
        pass
    return "yes"


@pytest.fixture(scope="module")
def shared_admin(tmp_path_factory):
    options = ("--aclfile", str(USERS), "--enable-debug-command", "yes")  # else it refuses DEBUG to every user
    with private_server(tmp_path_factory.mktemp("acl"), *options) as admin:
        for user in NAMES:
            admin.execute_command("ACL", "SETUSER", user, f">{user}-pw")
        yield admin


def test_the_users_cannot_log_in_before_they_are_given_a_password(tmp_path):
    with private_server(tmp_path / "redis", "--aclfile", str(USERS)) as admin:
        port = int(admin.config_get("port")["port"] or 0)
        for user in NAMES:
            once = Retry(NoBackoff(), 0)
            with (
                Redis(port=port, username=user, password="", retry=once) as connection,
                pytest.raises(AuthenticationError),
            ):
                connection.ping()


def test_a_workers_script_has_only_the_rights_of_the_worker(shared_admin):
    port = shared_admin.config_get("port")["port"]
    with Redis.from_url(f"redis://stoker-worker:stoker-worker-pw@127.0.0.1:{port}") as connection:
        digest = connection.script_load("return redis.call('GET', 'other')")
        with pytest.raises(ResponseError, match=r"(?i)permission|can't access"):
            connection.evalsha(digest, 0)


def test_the_worker_warns_of_a_forgetful_server_without_the_right_to_read_its_configuration(tmp_path):
    forgetful = ("--appendonly", "no", "--maxmemory-policy", "allkeys-lru", "--aclfile", str(USERS))
    with private_server(tmp_path / "redis", *forgetful) as admin:
        admin.execute_command("ACL", "SETUSER", "stoker-worker", ">pw")
        url = f"redis://stoker-worker:pw@127.0.0.1:{admin.config_get('port')['port']}"
        log = burst(url, tmp_path / "store")
    assert "keeps no append-only file" in log
    assert "may evict keys (allkeys-lru)" in log
