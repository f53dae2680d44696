"""Redis for this package: connections, the text of the scripts, which errors may pass by themselves so that a retry
helps, and an end for calls to a server that hangs. Owns nothing; any thread."""

import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from typing import Final

from redis import Connection, ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from stoker_shared.errors import RedisUnavailable
from stoker_shared.text import mask_text, mask_url, message_line, refusal_line

log = logging.getLogger(__name__)

_MIN_SERVER: Final = (6, 2, 0)
STANDBY_POLL_S: Final = 0.5
_TIMEOUT_S: Final = 25.0
"""Time limit of a call: a server that hangs must not block a thread for ever. RQ would replace a lower limit."""

_HUNG_UP_S: Final = 0.5
_AWAY: Final = (RedisConnectionError, RedisTimeoutError, RedisUnavailable, OutOfMemoryError, ReadOnlyError)

# Replies of a server that cannot write just now: its disk is full, a long script runs, its replicas are gone. Some have
# no error class of their own, and inside a transaction (up to Redis 6.2 also a script) other words come first.
_CANNOT_WRITE_NOW: Final = re.compile(
    r"(.* of pipeline caused error: |Transaction discarded because of: |Error running script .*: -)?"
    r"(BUSY|LOADING|MISCONF|NOREPLICAS|OOM|READONLY)\b",
    re.DOTALL,
)

_AT_THE_LINE_OF_A_SCRIPT: Final = re.compile(r" script: .*$")


@cache
def lua(*names: str) -> str:
    """The text of these files of `lua/`, one after the other: functions first, then the script that calls them."""
    folder = files(__package__) / "lua"
    return "".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)


def may_pass(error: Exception) -> bool:
    """True if Redis is away or cannot write just now. After any other error, a retry fails in the same way."""
    if isinstance(error, _AWAY):
        return True
    return isinstance(error, ResponseError) and _CANNOT_WRITE_NOW.match(str(error)) is not None


def reason_of(error: RedisError) -> str:
    """The error for the log, in the server's words; no part of a command, which may be a password or a result."""
    if isinstance(error, AuthenticationError):
        return "Redis refuses the login"
    if isinstance(error, RedisTimeoutError):
        return "Redis is away: no answer in time"
    text = _AT_THE_LINE_OF_A_SCRIPT.sub("", message_line(error)).rpartition(" of pipeline caused error: ")[2]
    if isinstance(error, RedisConnectionError) and not isinstance(error, BusyLoadingError):
        return f"Redis is away: {text.rstrip('.') or type(error).__name__}"
    found = _CANNOT_WRITE_NOW.match(text)
    return f"Redis refuses to write: {text[found.start(2) :] if found else text}".rstrip(".")


def connect(redis_url: str, *, wait: bool = False) -> Redis:
    """A connection to a server that answers, is new enough, and lets this worker in.

    Args:
        wait: for a server that is away or cannot work just now, instead of giving up.

    Raises:
        RedisUnavailable: as for `open_queue`; the message never holds the password.
    """
    shown = mask_url(redis_url)
    try:
        connection = client_of(redis_url, timeout_s=_TIMEOUT_S)
    except (ValueError, TypeError):
        # The parser's own text can quote a piece of the password.
        raise RedisUnavailable(f"{shown} is not a Redis URL: redis://[[user]:password@]host[:port][/db]") from None
    try:
        version = tuple(int(part) for part in _version(connection, wait=wait).split(".")[:3])
    except (AuthenticationError, ResponseError) as error:
        raise RedisUnavailable(f"{shown} refused this worker: {without_password(error, connection)}") from None
    except (RedisError, ValueError, OSError) as error:
        raise RedisUnavailable(f"no Redis at {shown}: {without_password(error, connection)}") from None
    if version < _MIN_SERVER:
        raise RedisUnavailable(f"{shown} is version {'.'.join(map(str, version))}; 6.2 or newer is needed")
    _warn_if_forgetful(connection, shown)
    return connection


def client_of(redis_url: str, *, timeout_s: float) -> Redis:
    """A client without hidden retries: a transaction whose reply was lost may have been carried out, so every caller
    looks before it tries again."""
    # A Unix socket has no peer that could vanish, and redis-py takes no such option for it.
    of_tcp = {} if redis_url.startswith("unix:") else {"socket_keepalive": True}
    return Redis.from_url(
        redis_url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=min(5.0, timeout_s),
        **of_tcp,
    )


def _version(connection: Redis, *, wait: bool) -> str:
    said = ""
    while True:
        try:
            return str(connection.info("server")["redis_version"])
        except RedisError as error:
            if not (wait and may_pass(error)) or isinstance(error, AuthenticationError):
                raise
            said = say_once(error, said)
        time.sleep(STANDBY_POLL_S)


def say_once(error: RedisError, said: str) -> str:
    kind = type(error).__name__
    if kind != said:
        log.warning("standing by: %s", reason_of(error))
    return kind


def without_password(error: Exception, connection: Redis) -> str:
    return mask_text(refusal_line(error), connection.connection_pool.connection_kwargs.get("password"))


def _warn_if_forgetful(connection: Redis, shown: str) -> None:
    try:
        # Not by CONFIG GET: the right to use it includes reading passwords.
        persistence, memory = connection.info("persistence"), connection.info("memory")
    except RedisError:  # it went away just now; this is only advice
        return
    if not persistence.get("aof_enabled", 1):
        log.warning("%s keeps no append-only file: queued jobs are lost when it restarts", shown)
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        log.warning("%s may evict keys (%s): jobs can vanish", shown, policy)


@contextmanager
def as_redis_unavailable() -> Iterator[None]:
    """Turn errors that may pass into `RedisUnavailable`: callers outside this package do not know redis-py's."""
    try:
        yield
    except RedisError as error:
        if not may_pass(error):
            raise
        raise RedisUnavailable(reason_of(error)) from error


def hang_up(pool: ConnectionPool) -> None:
    """Make each call under way fail now, as if the server had hung up, and limit later ones to half a second."""
    in_use = tuple(pool._in_use_connections)
    shorten(pool, _HUNG_UP_S)
    for connection in in_use:
        shut_down(connection)


def shut_down(connection: Connection) -> None:
    """Make the call that waits for a reply on this connection fail now, and limit the next one to half a second.

    The socket is shut down, not closed: `disconnect` would close it under the thread that reads from it, and redis-py
    would then raise errors that are not its own.
    """
    connection.socket_timeout = connection.socket_connect_timeout = _HUNG_UP_S
    sock: socket.socket | None = connection._sock
    if sock is not None:
        with suppress(OSError):  # it is closed already
            sock.shutdown(socket.SHUT_RDWR)


def shorten(pool: ConnectionPool, timeout_s: float) -> None:
    """Limit calls that begin from now on to `timeout_s`, or less."""
    timeout_s = min(timeout_s, pool.connection_kwargs["socket_timeout"])
    pool.connection_kwargs.update(socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    pool.reset()  # a connection that was made before keeps its long time limit
