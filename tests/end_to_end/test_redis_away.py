"""Redis goes away for longer than every lease and comes back with its file: no job is lost, none runs twice."""

import os
import re
import signal
import time

import pytest
from redis import Redis
from tests.support.worker_process import SHORT, running_worker

from stoker import Producer

pytestmark = pytest.mark.server


def test_jobs_that_end_while_redis_is_away_longer_than_the_lease_are_finished_when_it_is_back(server, tmp_path):
    producer = Producer(server.url)
    tickets = [producer.submit(agent_id=f"a{n}", prompt="x", max_tokens=60) for n in range(6)]
    options = ("--scripted-steps-per-s", "30", "--max-batch", "4")
    with running_worker(server.url, tmp_path / "store", *options, env=SHORT) as worker:
        worker.wait_for(lambda: sum(ticket.status().state == "started" for ticket in tickets) == 4)
        server.kill()
        time.sleep(3)
        server.start()
        results = [ticket.result(timeout_s=40) for ticket in tickets]
        with server.connection() as connection:
            assert [connection.xlen(f"rq:results:{ticket.job_id}") for ticket in tickets] == [1] * 6
        worker.wait_for(lambda: "outage over: Redis works again" in worker.log)
    warnings = [line for line in worker.log.splitlines() if " W " in line]
    assert len(warnings) == 2, "one line for the outage, one for its end"
    assert "outage begins: Redis is away" in warnings[0]
    assert [result.cache.agent_version for result in results] == [1] * 6
    assert {result.attempt for result in results} == {1}


@pytest.mark.parametrize("how", ["hangs for longer than the lease", "answers slowly"])
def test_a_server_that_hangs_or_is_slow_costs_nothing_either(server, tmp_path, how):
    """Unlike a killed server, it carries out later the commands it got."""
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


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_stop_while_redis_is_away_ends_soon_and_loses_no_finished_turn(server, tmp_path, how):
    """With a grace of a minute: it is for running jobs, and the stop does not wait for a Redis that is away."""
    producer = Producer(server.url)
    tickets = [producer.submit(agent_id=f"a{n}", prompt="x", context="append", max_tokens=100) for n in range(3)]
    long = producer.submit(agent_id="long", prompt="x", max_tokens=100_000)
    with running_worker(server.url, tmp_path / "store", "--scripted-steps-per-s", "50") as worker:
        worker.wait_for(lambda: all(ticket.status().state == "started" for ticket in [*tickets, long]))
        if how == "killed":
            server.kill()
        else:
            os.kill(pid := Redis.from_url(server.url).info("server")["process_id"], signal.SIGSTOP)
        time.sleep(3)  # three of the jobs end meanwhile
        assert "finished" not in worker.log
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0, worker.log
        took_s = time.monotonic() - began
    if how == "killed":
        server.start()
    else:
        os.kill(pid, signal.SIGCONT)
    print(f"the stop took {took_s:.2f} s")
    env = {"STOKER_GRACE_S": "0"}
    with running_worker(server.url, tmp_path / "store", log_name="next.log", env=env) as successor:
        results = [ticket.result(timeout_s=40) for ticket in tickets]
        successor.wait_for(lambda: len(re.findall(r"replayed job=.* version=1$", successor.log, re.MULTILINE)) == 3)
        assert long.status().state != "failed"
    assert [result.cache.agent_version for result in results] == [1] * 3
    assert took_s < 15  # 2 to 4; with a grace of a minute, the machine's speed does not matter
