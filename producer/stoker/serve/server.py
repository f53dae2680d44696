"""The web server: listens, and runs the application until it is told to stop. Owns the socket and the signals."""

import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from stoker.connection import address, open_connection, redis_errors
from stoker.serve.app import build_app
from stoker.serve.connections import MOST_CONNECTIONS, Connections, LimitedProtocol, possible_connections
from stoker.serve.settings import ServeSettings
from stoker_shared.errors import StokerError
from stoker_shared.http_guard import LOOPBACK_NAMES, host_name

_GRACE_S: Final = 30
_KEEP_ALIVE_S: Final = 75
_WAITING_CONNECTIONS: Final = 1024


def serve(redis_url: str, settings: ServeSettings, *, bind: str, port: int, report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; calls in flight then have some seconds to end.

    Args:
        bind: the name or address to listen on.
        port: 0 for any free one.
        report: called with lines for the operator.

    Raises:
        ValueError: not a Redis URL, or `bind` is not loopback and there are no tokens.
        OSError: the port is taken, or the batch store cannot be used.
        RedisUnavailable: no server answers, or it refused the client.
        StokerError: the application could not start; the log has the reason.
    """
    if settings.tokens is None and host_name(bind) not in LOOPBACK_NAMES:
        raise ValueError(f"{bind} can be reached from other machines: give --token-file to listen on it")
    with open_connection(redis_url) as connection, redis_errors(connection):
        connection.ping()
    app = build_app(redis_url, settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else any client can make it write a line
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.create_server((bind, port), family=family, backlog=_WAITING_CONNECTIONS) as listening:
        host = f"[{bind}]" if ":" in bind else bind
        report(f"serving {settings.queue!r} of {address(connection)} at http://{host}:{listening.getsockname()[1]}/v1")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container has no default handler
        server = web_server(app, possible_connections())
        with suppress(KeyboardInterrupt):
            with suppress(SystemExit):  # earlier versions of uvicorn only return if the application cannot start
                server.run(sockets=[listening])
            if not server.started:
                raise StokerError("the server could not start; the log has the reason")


def web_server(app: ASGIApp, most_connections: int = MOST_CONNECTIONS) -> uvicorn.Server:
    """A server of this application that is not started."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=partial(LimitedProtocol, Connections(most_connections)),  # type: ignore[arg-type]
            loop="asyncio",
            log_config=None,
            log_level="error",  # any client can cause uvicorn's warnings, one for each request
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            backlog=_WAITING_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
