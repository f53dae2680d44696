"""Ends the calls that wait for a server which hangs, and keeps later ones short. Owns nothing; any thread."""

import socket
from contextlib import suppress
from typing import Final

from redis import ConnectionPool

_TIMEOUT_S: Final = 0.5


def hang_up(pool: ConnectionPool) -> None:
    """Each call under way fails now, as if the server had closed its connection; later ones fail after half a second.

    The sockets are shut down, not closed: `ConnectionPool.disconnect` closes them under the threads that read from
    them, and the client then raises errors that are not its own.
    """
    in_use = tuple(pool._in_use_connections)
    shorten(pool, _TIMEOUT_S)
    for connection in in_use:
        sock: socket.socket | None = connection._sock
        if sock is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)


def shorten(pool: ConnectionPool, timeout_s: float) -> None:
    """Calls that begin from here on fail after `timeout_s`, or sooner."""
    timeout_s = min(timeout_s, pool.connection_kwargs["socket_timeout"])
    pool.connection_kwargs.update(socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    pool.reset()  # a connection that was made before keeps its long time limit
