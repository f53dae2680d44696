"""Calls to Redis: the text of scripts, which errors pass by themselves, so that trying again helps, and an end for
calls that wait for a server which hangs. Owns nothing; any thread.
"""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from typing import Final

from redis import Connection, ConnectionPool
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

from stoker_shared.errors import RedisUnavailable
from stoker_shared.text import message_line

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
    """The text of these files of `lua/`, one after the other: a script behind the functions that it calls."""
    folder = files(__package__) / "lua"
    return "".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)


def may_pass(error: Exception) -> bool:
    """True if Redis is away or cannot write just now. Anything else it refuses, it refuses again."""
    if isinstance(error, _AWAY):
        return True
    return isinstance(error, ResponseError) and _CANNOT_WRITE_NOW.match(str(error)) is not None


def reason_of(error: RedisError) -> str:
    """The error for the log: in the server's own words, and without any part of a command, which may hold a
    password or a result."""
    if isinstance(error, AuthenticationError):
        return "Redis refuses the login"
    if isinstance(error, RedisTimeoutError):
        return "Redis is away: no answer in time"
    text = _AT_THE_LINE_OF_A_SCRIPT.sub("", message_line(error)).rpartition(" of pipeline caused error: ")[2]
    if isinstance(error, RedisConnectionError) and not isinstance(error, BusyLoadingError):
        return f"Redis is away: {text.rstrip('.') or type(error).__name__}"
    found = _CANNOT_WRITE_NOW.match(text)
    return f"Redis refuses to write: {text[found.start(2) :] if found else text}".rstrip(".")


@contextmanager
def as_redis_unavailable() -> Iterator[None]:
    """Raise errors that pass as `RedisUnavailable`: callers outside this package know no errors of the client's."""
    try:
        yield
    except RedisError as error:
        if not may_pass(error):
            raise
        raise RedisUnavailable(reason_of(error)) from error


def hang_up(pool: ConnectionPool) -> None:
    """Each call under way fails now, as if the server had closed its connection; later ones after half a second."""
    in_use = tuple(pool._in_use_connections)
    shorten(pool, _HUNG_UP_S)
    for connection in in_use:
        shut_down(connection)


def shut_down(connection: Connection) -> None:
    """The call that waits for a reply on this connection fails now, and its next one after half a second.

    The socket is shut down, not closed: `disconnect` closes it under the thread that reads from it, and the client then
    raises errors that are not its own.
    """
    connection.socket_timeout = connection.socket_connect_timeout = _HUNG_UP_S
    sock: socket.socket | None = connection._sock
    if sock is not None:
        with suppress(OSError):  # it is closed already
            sock.shutdown(socket.SHUT_RDWR)


def shorten(pool: ConnectionPool, timeout_s: float) -> None:
    """Calls that begin from here on fail after `timeout_s`, or sooner."""
    timeout_s = min(timeout_s, pool.connection_kwargs["socket_timeout"])
    pool.connection_kwargs.update(socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    pool.reset()  # a connection that was made before keeps its long time limit
