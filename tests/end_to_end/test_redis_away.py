"""Redis goes away for longer than every lease, and comes back with its file: nothing is lost, nothing is run twice."""

import os
import signal
import time

import pytest
from redis import Redis
from tests.worker_process import running_worker

from stoker import Producer
from stoker_worker.redis_server import EmbeddedServer

pytestmark = pytest.mark.server

SHORT = {"STOKER_HEARTBEAT_S": "0.2", "STOKER_LEASE_TTL_S": "1", "STOKER_RECOVER_S": "0.5", "STOKER_GRACE_S": "1"}


@pytest.fixture
def server(redis_server, tmp_path):
    """A server of the test's own, to be killed; asked for after `redis_server`, which skips where there is none."""
    server = EmbeddedServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def kill(server):
    pid = Redis.from_url(server.url).info("server")["process_id"]
    time.sleep(1.1)  # the append-only file is synced every second
    os.kill(pid, signal.SIGKILL)


def start_again(server, folder):
    port = int(server.url.rpartition(":")[2])
    again = EmbeddedServer(folder, port)
    again.start()
    return again


def test_jobs_that_end_while_redis_is_away_longer_than_the_lease_are_finished_when_it_is_back(server, tmp_path):
    producer = Producer(server.url)
    tickets = [producer.submit(agent_id=f"a{n}", prompt="x", max_tokens=60) for n in range(6)]
    options = ("--scripted-steps-per-s", "30", "--max-batch", "4")
    with running_worker(server.url, tmp_path / "store", *options, env=SHORT) as worker:
        worker.wait_for(lambda: sum(ticket.status().state == "started" for ticket in tickets) == 4)
        kill(server)
        time.sleep(3)
        again = start_again(server, tmp_path / "redis")
        try:
            results = [ticket.result(timeout_s=40) for ticket in tickets]
            connection = Redis.from_url(server.url)
            assert [connection.xlen(f"rq:results:{ticket.job_id}") for ticket in tickets] == [1] * 6
        finally:
            worker.signal(signal.SIGTERM)
            worker.wait()
            again.stop()
    assert [result.cache.agent_version for result in results] == [1] * 6
    assert {result.attempt for result in results} == {1}


@pytest.mark.parametrize("how", ["stands still for longer than the lease", "answers slowly"])
def test_a_server_that_is_there_but_does_not_answer_costs_nothing_either(server, tmp_path, how):
    """Unlike one that is gone it carries out later what it was sent."""
    producer = Producer(server.url)
    tickets = [producer.submit(agent_id=f"a{n % 4}", prompt="x", context="append", max_tokens=60) for n in range(8)]
    options = ("--scripted-steps-per-s", "60", "--max-batch", "4")
    with running_worker(server.url, tmp_path / "store", *options, env=SHORT) as worker:
        worker.wait_for(lambda: sum(ticket.status().state == "started" for ticket in tickets) == 4)
        with Redis.from_url(server.url) as connection:
            if how == "answers slowly":
                for _ in range(6):
                    connection.client_pause(300)
                    time.sleep(0.4)
            else:
                pid = connection.info("server")["process_id"]
                os.kill(pid, signal.SIGSTOP)
                time.sleep(3)  # jobs end meanwhile
                os.kill(pid, signal.SIGCONT)
            results = [ticket.result(timeout_s=40) for ticket in tickets]
            assert [connection.xlen(f"rq:results:{ticket.job_id}") for ticket in tickets] == [1] * 8
            assert connection.zcard("rq:wip:generate") == connection.llen("rq:queue:generate") == 0
        assert worker.returncode is None, worker.log
    assert [result.cache.agent_version for result in results] == [1] * 4 + [2] * 4
    assert {result.attempt for result in results} == {1}


def test_a_stop_ends_also_when_redis_does_not_come_back(server, tmp_path):
    ticket = Producer(server.url).submit(agent_id="a", prompt="x", max_tokens=100_000)
    with running_worker(server.url, tmp_path / "store", env=SHORT) as worker:
        worker.wait_for(lambda: ticket.status().state == "started")
        kill(server)
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0, worker.log
