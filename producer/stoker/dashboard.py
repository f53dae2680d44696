"""`stoker dashboard`: rq-dashboard on one address, until it is told to stop. Owns the socket and who may reach it.

What the pages show, and how they are kept from running what is in a job, is `dashboard_app.py`.
"""

import ipaddress
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from stoker.connection import address, open_connection, redis_errors

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def serve_dashboard(
    redis_url: str,
    *,
    bind: str,
    port: int,
    allow_remote: bool,
    names: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. RQ never unpickles in this process from here on.

    Args:
        bind: name or address to listen at.
        port: 0 for any free one.
        allow_remote: needed when `bind` is not loopback.
        names: host names or addresses browsers may reach it by, beside `bind` and loopback.
        say: called with lines for the operator.

    Raises:
        ValueError: not a Redis URL, or `bind` is not loopback and `allow_remote` is not given.
        RedisUnavailable: no server answers, or it refused us.
        ModuleNotFoundError: the packages of ``stoker[dashboard]`` are not there.
    """
    if not is_loopback(bind):
        if not allow_remote:
            raise ValueError(
                f"{bind} can be reached from other machines, and the dashboard has no password: whoever reaches it "
                "reads every prompt and may delete jobs. --allow-remote does it all the same"
            )
        say(f"warning: whoever reaches {bind} can read every prompt and delete jobs; there is no password")
    from werkzeug.serving import make_server

    from stoker.dashboard_app import build_app

    connection = open_connection(redis_url)
    with redis_errors(connection):
        connection.ping()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request, every 2.5 s and open page
    app = build_app(connection, names={name.lower() for name in (*LOOPBACK_NAMES, bind, *names)})
    server = make_server(bind, port, app, threaded=True)
    say(f"queues of {address(connection)} at http://{_in_url(bind)}:{server.port}/")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container has no default of its own
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def is_loopback(bind: str) -> bool:
    """Whether only this machine reaches `bind`; any name but ``localhost`` may be anybody's."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _in_url(bind: str) -> str:
    return f"[{bind}]" if ":" in bind else bind
