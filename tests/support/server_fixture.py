"""A private Redis or Valkey server for the whole session, empty at the start of each test that asks for it."""

import os
import subprocess
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from redis import Redis

from stoker import Producer
from stoker_shared.errors import RedisUnavailable
from stoker_worker.embedded_redis import EmbeddedServer, find_program


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server. It needs no password: proxies and plain clients have its port alone."""
    require_server_program()
    with EmbeddedServer(tmp_path_factory.mktemp("redis")) as server:
        parts = urlsplit(server.url)
        url = f"redis://{parts.hostname}:{parts.port}"
        with Redis.from_url(server.url) as connection:
            # Small hashes, too, come back in no order of insertion then: on some servers they do so anyway.
            connection.config_set("hash-max-ziplist-entries", 0)
            connection.config_set("requirepass", "")
        yield url
        with Redis.from_url(url) as connection:
            connection.config_set("requirepass", str(parts.password))  # `stop` gives it


@pytest.fixture
def redis_url(redis_server: str) -> str:
    with Redis.from_url(redis_server) as connection:
        connection.flushall()  # only ever our own server: the URL is that of the one we started
    return redis_server


@pytest.fixture
def connection(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def producer(redis_url: str) -> Iterator[Producer]:
    with Producer(redis_url) as producer:
        yield producer


def server_version() -> str:
    """The line that the server's program prints of itself, or why there is none."""
    try:
        return subprocess.run([find_program(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    except RedisUnavailable as error:
        return str(error)


def require_server_program() -> None:
    """Skip on a laptop without a server, fail if CI is set: there a missing server would hide half the tests."""
    try:
        find_program()
    except RedisUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
