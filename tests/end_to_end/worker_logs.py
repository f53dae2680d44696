"""Logs of workers that meet trouble, for the messages of docs/troubleshooting.md."""

import signal
import time

from redis import Redis
from rq.suspension import suspend
from tests.end_to_end.refused_jobs import raised
from tests.support.private_server import free_port, private_server
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker_worker.embedded_redis import EmbeddedServer

ANY_STORE = {"STOKER_NEW_STORE": "1"}  # these workers serve one queue after the other
WITHOUT_PATIENCE = {
    **ANY_STORE,
    "STOKER_HEARTBEAT_S": "0.1", "STOKER_LEASE_TTL_S": "0.5", "STOKER_RECOVER_S": "0.2", "STOKER_GRACE_S": "0",
}  # fmt: skip


def outage_log(folder):
    """A server that refuses to write, works again, and goes away."""
    with EmbeddedServer(folder / "away") as server, Redis.from_url(server.url) as connection:
        with running_worker(server.url, folder / "away", env=WITHOUT_PATIENCE) as worker:
            worker.wait_until_ready()
            connection.config_set("maxmemory", 1)
            worker.wait_for(lambda: "refuses to write" in worker.log)
            connection.config_set("maxmemory", 0)
            worker.wait_for(lambda: "outage over" in worker.log)
            server.stop()
            worker.wait_for(lambda: "Redis is away" in worker.log)
            worker.kill()
        return worker.log


def forgetful_log(folder):
    """A worker at a server that may lose jobs."""
    with private_server(folder / "server", "--appendonly", "no", "--maxmemory-policy", "allkeys-lru") as admin:
        url = f"redis://127.0.0.1:{admin.config_get('port')['port']}"
        with running_worker(url, folder / "forgetful", "--burst") as worker:
            worker.wait()
        return worker.log


def standby_log(folder):
    with running_worker(f"redis://127.0.0.1:{free_port()}", folder / "standby", "--standby") as worker:
        worker.wait_for(lambda: "standing by" in worker.log)
        worker.kill()
    return worker.log


def crash_log(redis_url, folder):
    """One job that ends three workers; the log of the fourth."""
    with Producer(redis_url) as producer:
        producer.submit(agent_id="a", prompt="crash")
    for _ in range(3):
        with running_worker(redis_url, folder / "store", env=ANY_STORE) as worker:
            worker.wait()
    with running_worker(redis_url, folder / "store", "--burst", log_name="last.log", env=ANY_STORE) as worker:
        assert worker.wait() == 0
    return worker.log


def broken_log(redis_url, folder):
    with Producer(redis_url) as producer:
        ticket = producer.submit(prompt="break it")
        with running_worker(redis_url, folder / "broken", env=ANY_STORE) as worker:
            assert worker.wait() == 1
        ticket.cancel()
    return worker.log


def stopped_log(redis_url, folder):
    """A worker that is stopped for longer than its lease while another one takes its name."""
    with running_worker(redis_url, folder / "first", "--name", "mac", env=WITHOUT_PATIENCE) as first:
        first.wait_until_ready()
        first.signal(signal.SIGSTOP)
        time.sleep(0.6)
        with running_worker(redis_url, folder / "second", "--name", "mac", env=ANY_STORE) as second:
            second.wait_until_ready()
            first.signal(signal.SIGCONT)
            first.wait()
    return first.log


def lost_data_log(redis_url, folder):
    """A server that is flushed while a job runs; then an operator suspends the workers."""
    with running_worker(redis_url, folder / "lost", env=WITHOUT_PATIENCE) as worker, Producer(redis_url) as producer:
        worker.wait_until_ready()
        producer.submit(agent_id="a", prompt="x", max_tokens=100_000)
        worker.wait_for(lambda: "claimed job=" in worker.log)
        with Redis.from_url(redis_url) as connection:
            connection.flushall()
            worker.wait_for(lambda: "lost job=" in worker.log)
            suspend(connection)
            worker.wait_for(lambda: "suspended (rq suspend)" in worker.log)
            connection.flushall()
    return worker.log


def unsaved_log(redis_url, small_disk):
    options = (redis_url, small_disk.path / "store", "--queues", "full")
    with Producer(redis_url, queue="full") as producer, running_worker(*options) as worker:
        worker.wait_until_ready()
        small_disk.fill()
        reason = raised(producer.submit(agent_id="a", prompt="x", context="append").result, 30)
        small_disk.free()
        time.sleep(1.6)  # an outage is over when nothing has failed for 1.5 s
        producer.submit(agent_id="a", prompt="x").result(30)
        worker.wait_for(lambda: "outage over" in worker.log)
    return worker.log, reason


def overfull_log(redis_url, folder):
    with Producer(redis_url) as producer:
        producer.submit(agent_id="a", prompt="x", max_tokens=4)
        with running_worker(redis_url, folder / "full", "--store-max-bytes", "1", "--burst", env=ANY_STORE) as worker:
            worker.wait()
    return worker.log
