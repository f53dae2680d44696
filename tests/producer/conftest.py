"""A producer on fakeredis, which keeps RQ's keys faithfully, and somebody who plays the worker."""

from collections.abc import Iterator

import pytest
from fakeredis import FakeRedis
from redis import Redis
from tests.producer.played_worker import PlayedWorker

from stoker import Producer


@pytest.fixture
def connection() -> Iterator[Redis]:
    with FakeRedis() as connection:
        yield connection
        connection.flushall()


@pytest.fixture
def producer(connection: Redis) -> Producer:
    return Producer(connection)


@pytest.fixture
def worker(connection: Redis) -> PlayedWorker:
    return PlayedWorker(connection)
