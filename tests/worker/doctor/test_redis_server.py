"""The doctor's checks of the queue's server, on a real one."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from redis import Redis

from stoker_worker.doctor import redis_server
from stoker_worker.doctor.check import Finding, Status
from stoker_worker.settings import EMBEDDED


def found_at(url: str) -> dict[str, Finding]:
    return {check.name: check.made() for check in redis_server.checks(url)}


@pytest.fixture
def configured(connection: Redis) -> Iterator[Redis]:
    """A connection to a server whose settings are put back."""
    names = ("maxmemory-policy", "maxmemory", "appendonly")
    before = {name: str(connection.config_get(name)[name]) for name in names}
    yield connection
    for name, value in before.items():
        connection.config_set(name, value)


def test_nothing_is_wrong_with_a_server_of_the_workers_own() -> None:
    found = found_at(EMBEDDED)
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(
        ["redis", "redis memory", "redis persistence", "redis latency", "clock"], Status.OK
    )
    assert found["redis"].figures["version"]
    assert found["redis latency"].figures["ping_ms"] > 0


def test_settings_that_lose_jobs_are_found(redis_url: str, configured: Redis) -> None:
    configured.config_set("maxmemory-policy", "allkeys-lru")
    configured.config_set("appendonly", "no")
    found = found_at(redis_url)
    assert found["redis memory"].status == Status.FAIL
    assert "noeviction" in found["redis memory"].advice
    assert found["redis persistence"].status == Status.WARN


def test_a_server_that_is_nearly_full_is_found(redis_url: str, configured: Redis) -> None:
    configured.config_set("maxmemory", int(configured.info("memory")["used_memory"] * 1.1))
    assert found_at(redis_url)["redis memory"].status == Status.WARN


def test_a_server_that_is_away_ends_its_checks_and_tells_no_password() -> None:
    found = found_at("redis://user:geheim@127.0.0.1:1")
    assert [(name, finding.status) for name, finding in found.items()] == [("redis", Status.FAIL)]
    assert "geheim" not in json.dumps(asdict(found["redis"]))


def test_a_clock_that_differs_is_found(connection: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_server.clock(connection).status == Status.OK
    seconds, microseconds = connection.time()
    monkeypatch.setattr(connection, "time", lambda: (seconds + 3600, microseconds))
    found = redis_server.clock(connection)
    assert found.status == Status.WARN
    assert found.line.endswith("behind the server's")
    assert -3601 < found.figures["ahead_s"] < -3500
