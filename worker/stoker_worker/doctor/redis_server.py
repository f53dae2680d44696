"""Checks of the queue's server. Writes nothing into it; the password is in no finding."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from stoker_shared.errors import RedisUnavailable
from stoker_shared.text import mask_url
from stoker_worker.doctor.check import Check, Finding, fail, ok, warn
from stoker_worker.settings import EMBEDDED

if TYPE_CHECKING:
    from redis import Redis

_PINGS: Final = 50
_SLOW_PING_MS: Final = 20.0
_MOST_SKEW_S: Final = 1.0
_NEARLY_FULL: Final = 0.8


def checks(redis_url: str) -> Iterator[Check]:
    """The checks of the server at the URL; of one of our own in a temporary folder for `embedded`."""
    with ExitStack() as closing:
        server = _Server(redis_url, closing)
        yield Check("redis", server.answers)
        if server.connection is not None:
            connection = server.connection
            yield Check("redis memory", lambda: memory(connection))
            yield Check("redis persistence", lambda: persistence(connection))
            yield Check("redis latency", lambda: latency(connection))
            yield Check("clock", lambda: clock(connection))


class _Server:
    """
    Attributes:
        connection: ``None`` until the server has answered.
    """

    def __init__(self, redis_url: str, closing: ExitStack) -> None:
        self._url = redis_url
        self._closing = closing
        self.connection: Redis | None = None

    def answers(self) -> Finding:
        from stoker_worker.queue.connect import connect

        is_own = self._url == EMBEDDED
        try:
            url = self._started() if is_own else self._url
            connection = connect(url)
        except RedisUnavailable as error:
            return fail(str(error), "start a server, give its URL with --redis, or use --redis embedded")
        self._closing.callback(connection.close)
        self.connection = connection
        info = connection.info()
        name = "Valkey" if "valkey_version" in info else "Redis"
        number = info.get("valkey_version", info["redis_version"])
        where = "a server of the worker's own, tried in a temporary folder" if is_own else mask_url(url)
        line, figures = f"{name} {number}: {where}", {"server": name, "version": number, "embedded": is_own}
        if info.get("role", "master") != "master":
            return fail(f"{line}, a replica", "give the URL of its master: a worker has to write", **figures)
        return ok(line, **figures)

    def _started(self) -> str:
        from stoker_worker.embedded_redis.server import EmbeddedServer

        folder = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="stoker-doctor-"))
        return self._closing.enter_context(EmbeddedServer(Path(folder) / "redis")).url


def memory(connection: "Redis") -> Finding:
    info = connection.info("memory")
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    used = int(info["used_memory"])
    figures: dict[str, Any] = {"used_bytes": used, "maxmemory_bytes": limit, "policy": policy}
    line = f"{_mb(used)} used of {_mb(limit) if limit else 'any amount'}, policy {policy}"
    if policy != "noeviction":
        return fail(line, "CONFIG SET maxmemory-policy noeviction: else jobs can vanish", **figures)
    if limit and used > _NEARLY_FULL * limit:
        return warn(line, "raise maxmemory: a full server takes no jobs and no results", **figures)
    return ok(line, **figures)


def persistence(connection: "Redis") -> Finding:
    info = connection.info("persistence")
    is_on = bool(info.get("aof_enabled", 0))
    if not is_on:
        advice = "CONFIG SET appendonly yes, and in its file: else queued jobs are lost when it restarts"
        return warn("no append-only file", advice, appendonly=False)
    if info.get("aof_last_write_status", "ok") != "ok":
        return fail("its append-only file cannot be written", "look at the server's log and its disk", appendonly=True)
    return ok("append-only file", appendonly=True)


def latency(connection: "Redis") -> Finding:
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        connection.ping()
        times.append((time.perf_counter() - began) * 1000)
    middle, most = median(times), max(times)
    line, figures = f"a ping takes {middle:.2f} ms, at most {most:.2f} ms", {"ping_ms": middle, "longest_ping_ms": most}
    if middle > _SLOW_PING_MS:
        return warn(line, "use a server nearer to the worker: each job takes several round trips", **figures)
    return ok(line, **figures)


def clock(connection: "Redis") -> Finding:
    before = time.time()
    seconds, microseconds = connection.time()
    after = time.time()
    ahead_s = (before + after) / 2 - (seconds + microseconds / 1e6)
    line = f"{abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
    if abs(ahead_s) > _MOST_SKEW_S + (after - before):
        return warn(line, "let both machines set their clocks by NTP: times in results are wrong", ahead_s=ahead_s)
    return ok(line, ahead_s=ahead_s)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.0f} MB"
