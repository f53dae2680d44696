"""A standby keeps waiting while Redis is away or cannot write, and then takes over."""

import signal
import time

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.lossy_proxy import LossyProxy
from tests.support.server_fixture import require_server_program
from tests.support.wait import wait_for
from tests.support.worker_process import SHORT, running_worker
from tests.worker.queue.looking import LEASE

from stoker import Producer
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server


def finished_by_the_standby(server, standby):
    ticket = Producer(server.url).submit(agent_id="a", prompt="x", max_tokens=3)
    standby.wait_for(lambda: ticket.status().state == "finished")
    return ticket.result(timeout_s=1)


@pytest.mark.parametrize("trouble", ["away", "out of memory"])
def test_a_standby_takes_over_after_redis_was_in_trouble_at_its_first_try(server, tmp_path, trouble):
    store = tmp_path / "store"
    with server.connection() as connection, running_worker(server.url, store, env=SHORT) as first:
        first.wait_until_ready()
        with running_worker(server.url, store, "--standby", log_name="standby.log", env=SHORT) as standby:
            standby.wait_for(lambda: "standing by" in standby.log)
            if trouble == "away":
                server.kill()
            else:
                connection.config_set("maxmemory", 1)
            first.kill()
            standby.wait_for(lambda: "standing by: Redis " in standby.log)
            time.sleep(2)  # longer than the lease, and several tries
            assert standby.returncode is None, standby.log
            server.start() if trouble == "away" else connection.config_set("maxmemory", 0)
            assert finished_by_the_standby(server, standby).finish_reason == "length"
            assert standby.log.count("standing by: Redis ") <= 2  # logged once, not at each try


def test_a_standby_has_an_embedded_server_after_that_of_its_predecessor_ended(tmp_path):
    require_server_program()
    store, env = tmp_path / "store", {**SHORT, "HOME": str(tmp_path)}
    with running_worker("embedded", store, env=env) as first:
        first.wait_until_ready()
        with running_worker("embedded", store, "--standby", log_name="standby.log", env=env) as standby:
            standby.wait_for(lambda: "standing by" in standby.log)
            first.signal(signal.SIGTERM)
            assert first.wait() == 0
            standby.wait_until_ready()
            with Producer((tmp_path / ".stoker" / "redis.url").read_text().splitlines()[0]) as producer:
                ticket = producer.submit(agent_id="a", prompt="x", max_tokens=3)
                standby.wait_for(lambda: ticket.status().state == "finished")


def test_a_standby_that_starts_while_redis_is_away_waits_for_it(server, tmp_path):
    server.kill()
    with running_worker(server.url, tmp_path / "store", "--standby", env=SHORT) as standby:
        standby.wait_for(lambda: "standing by: Redis " in standby.log)
        server.start()
        assert finished_by_the_standby(server, standby).finish_reason == "length"
        standby.signal(signal.SIGTERM)
        assert standby.wait() == 0


@pytest.mark.parametrize("step", ["beat", "subscribe"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_half_finished_registration_starts_over_and_leaves_one_entry(server, monkeypatch, step, when):
    """`after`: the reply was lost, and the command had taken effect."""
    real, calls = getattr(RqRegistration, step), []

    def breaking(identity, *args, **options):
        calls.append(step)
        if len(calls) > 1:
            return real(identity, *args, **options)
        if when == "after":
            real(identity, *args, **options)
        server.kill()
        server.start()
        raise RedisConnectionError("gone")

    monkeypatch.setattr(RqRegistration, step, breaking)
    settings = read_settings({"redis_url": server.url, "lease_ttl_s": 60, "standby": True})
    with open_queue(settings, server.url) as opened, server.connection() as connection:
        assert connection.smembers("rq:workers:generate") == {opened.registration.key.encode()}
        assert connection.hget(opened.registration.key, "state") == b"idle"
        channel = opened.registration.pubsub_channel_name
        wait_for(lambda: connection.pubsub_numsub(channel)[0][1] == 1)
        assert opened.rq_queue.beat()


def test_a_lease_whose_reply_was_lost_is_recognised_as_its_own(server):
    with open_queue(read_settings({"redis_url": server.url}), server.url):
        pass  # from here on the server has the scripts
    with LossyProxy(server.port) as proxy, server.connection() as connection:
        proxy.lose(lambda exchange: exchange.is_write and exchange.holds(LEASE))
        url = f"redis://127.0.0.1:{proxy.port}"
        begin = time.monotonic()
        settings = read_settings({"redis_url": url, "lease_ttl_s": 60, "standby": True})
        with open_queue(settings, url) as opened:
            assert len(proxy.lost) == 1
            assert time.monotonic() - begin < 30  # it did not wait for its own lease to expire
            assert opened.rq_queue.beat()
        assert not connection.exists(LEASE)
