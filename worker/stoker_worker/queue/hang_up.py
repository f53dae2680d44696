"""Ends the calls that wait for a server which hangs, and keeps later ones short. Owns nothing; any thread."""

import socket
from contextlib import suppress
from typing import Final

from redis import Connection, ConnectionPool

_TIMEOUT_S: Final = 0.5


def hang_up(pool: ConnectionPool) -> None:
    """Each call under way fails now, as if the server had closed its connection; later ones after half a second."""
    in_use = tuple(pool._in_use_connections)
    shorten(pool, _TIMEOUT_S)
    for connection in in_use:
        shut_down(connection)


def shut_down(connection: Connection) -> None:
    """The call that waits for a reply on this connection fails now, and its next one after half a second.

    The socket is shut down, not closed: `disconnect` closes it under the thread that reads from it, and the client then
    raises errors that are not its own.
    """
    connection.socket_timeout = connection.socket_connect_timeout = _TIMEOUT_S
    sock: socket.socket | None = connection._sock
    if sock is not None:
        with suppress(OSError):  # it is closed already
            sock.shutdown(socket.SHUT_RDWR)


def shorten(pool: ConnectionPool, timeout_s: float) -> None:
    """Calls that begin from here on fail after `timeout_s`, or sooner."""
    timeout_s = min(timeout_s, pool.connection_kwargs["socket_timeout"])
    pool.connection_kwargs.update(socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    pool.reset()  # a connection that was made before keeps its long time limit
