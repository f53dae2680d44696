"""The proxy loses the replies it was asked to lose, after the server carried the command out, and no others."""

import time
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from tests.chaos.restarting_server import RestartingServer
from tests.lossy_proxy import LossyProxy


@pytest.fixture
def proxy(redis_url):
    with LossyProxy(urlsplit(redis_url).port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as client:
        yield client


def _count(client):
    with client.pipeline() as pipeline:
        pipeline.incr("n")
        pipeline.execute()


def test_a_lost_reply_belongs_to_a_transaction_that_was_carried_out(client, proxy):
    proxy.lose_nth_write(1)
    _count(client)
    with pytest.raises(RedisConnectionError):
        _count(client)
    _count(client)
    assert client.get("n") == b"3"
    assert [exchange.names for exchange in proxy.lost] == [("INCRBY",)]


def test_plain_commands_and_channels_pass(client, proxy):
    listener = client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe("news")
    client.set("large", b"x" * 300_000)
    assert client.get("large") == b"x" * 300_000
    end = time.monotonic() + 5
    while not client.publish("news", "hello") and time.monotonic() < end:
        pass  # the subscription is on its way, on another connection
    while (message := listener.get_message(timeout=0.1)) is None and time.monotonic() < end:
        pass
    assert message is not None
    assert message["data"] == b"hello"
    listener.close()


def test_a_reply_is_held_back(client, proxy):
    proxy.hold_back(lambda exchange: exchange.holds("GET", "slow"), 0.3)
    began = time.monotonic()
    client.get("slow")
    assert time.monotonic() - began >= 0.3


def test_the_proxy_outlives_an_outage_of_its_server(tmp_path):
    server = RestartingServer(tmp_path / "redis")
    try:
        with LossyProxy(server.port) as proxy, Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as client:
            client.set("key", "value")
            server.kill()
            with pytest.raises(RedisConnectionError):
                client.get("key")
            server.start()
            assert client.get("key") == b"value"
    finally:
        server.stop()


def test_losses_and_delays_that_were_asked_for_are_taken_back(client, proxy):
    proxy.lose(lambda exchange: True, times=100)
    with pytest.raises(RedisConnectionError):
        client.get("n")
    proxy.spare_all()
    _count(client)
    assert client.get("n") == b"1"
