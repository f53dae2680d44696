"""The dashboard's web server: runs until it is told to stop. Owns the socket and decides who may reach it."""

import ipaddress
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from stoker.connection import address, open_connection, redis_errors
from stoker_shared.http_guard import LOOPBACK_NAMES


def serve_dashboard(
    redis_url: str, *, bind: str, port: int, allow_remote: bool, names: Sequence[str], report: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. From here on RQ never unpickles in this process.

    Args:
        bind: the name or address to listen on.
        port: 0 for any free one.
        allow_remote: required when `bind` is not loopback.
        names: host names or addresses that browsers may use, besides `bind` and loopback.
        report: called with lines for the operator.

    Raises:
        ValueError: not a Redis URL, or `bind` is not loopback and `allow_remote` was not given.
        RedisUnavailable: no server answers, or it refused us.
        ModuleNotFoundError: the packages of ``stoker[dashboard]`` are not installed.
    """
    if not is_loopback(bind):
        if not allow_remote:
            raise ValueError(
                f"{bind} can be reached from other machines, and the dashboard has no password: anybody there could "
                "read every prompt and delete jobs; give --allow-remote to listen on it nevertheless"
            )
        report(f"warning: anybody who can reach {bind} can read every prompt and delete jobs; there is no password")
    from stoker.dashboard.app import build_app
    from stoker.dashboard.web_server import WebServer

    connection = open_connection(redis_url)
    with redis_errors(connection):
        connection.ping()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each open page every 2.5 s
    app = build_app(connection, names={name.lower() for name in (*LOOPBACK_NAMES, bind, *names)})
    server = WebServer(bind, port, app)
    report(f"queues of {address(connection)} at http://{_in_url(bind)}:{server.port}/")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container has no default handler
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def is_loopback(bind: str) -> bool:
    """Whether only this machine can reach `bind`. Of names, only ``localhost`` is trusted to be loopback."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _in_url(bind: str) -> str:
    return f"[{bind}]" if ":" in bind else bind
