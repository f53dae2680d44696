"""The dashboard's application and its web server, which runs until it is told to stop. Decides who may reach it.

The repairs replace parts of RQ and rq-dashboard in this process, so the dashboard should have a process of its own.
"""

import ipaddress
import logging
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from flask import Flask
from redis import Redis
from rq_dashboard import web
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from stoker.connection import address, open_connection, redis_errors
from stoker.dashboard.pages import (
    find_own_templates,
    open_a_queue_with_jobs,
    show_progress_of_jobs,
    show_stoker_in_place_of_workers,
)
from stoker.dashboard.repairs import (
    answer_errors_in_one_line,
    confine_scripts,
    encode_unreadable_meta,
    escape_job_texts,
    escape_names_in_scripts,
    find_names_with_slashes,
    never_unpickle,
    read_jobs_of_any_client,
    refuse_other_names,
    refuse_other_sites,
    share_connection,
)
from stoker_shared.http_guard import LOOPBACK_NAMES, LimitedHead, LimitedThreads


class WebServer(LimitedThreads, ThreadedWSGIServer):
    def __init__(self, bind: str, port: int, app: Flask) -> None:
        super().__init__(bind, port, app, _Handler)


class _Handler(LimitedHead, WSGIRequestHandler):
    def log_error(self, *_: Any) -> None:
        """Log nothing: anyone can cause a line with a malformed request; errors of a page are logged elsewhere."""


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
        RedisUnavailable: no server answers, or it refused the client.
    """
    if not is_loopback(bind):
        if not allow_remote:
            raise ValueError(
                f"{bind} can be reached from other machines, and the dashboard has no password: anybody there could "
                "see every result and delete jobs; give --allow-remote to listen on it nevertheless"
            )
        report(f"warning: anybody who can reach {bind} can see every result and delete jobs; there is no password")
    connection = open_connection(redis_url)
    with redis_errors(connection):
        connection.ping()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else each open page logs a line every 2.5 s
    app = build_app(connection, names={name.lower() for name in (*LOOPBACK_NAMES, bind, *names)})
    server = WebServer(bind, port, app)
    report(f"queues of {address(connection)} at http://{_in_url(bind)}:{server.port}/")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container has no default handler
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def is_loopback(bind: str) -> bool:
    """True if only this machine can reach `bind`. The only name that counts as loopback is ``localhost``."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _in_url(bind: str) -> str:
    return f"[{bind}]" if ":" in bind else bind


def build_app(connection: Redis, *, names: Collection[str]) -> Flask:
    """The application on this connection. `names` are the hosts that a browser may use in its requests, in lower case,
    IPv6 addresses without brackets."""
    app = Flask(web.__name__)
    app.debug = False  # FLASK_DEBUG would offer a console
    never_unpickle()
    share_connection(app, connection)
    read_jobs_of_any_client()
    encode_unreadable_meta(app)
    find_names_with_slashes(app)
    app.register_blueprint(web.blueprint)
    web.setup_rq_connection(app)
    find_own_templates(app)
    escape_names_in_scripts(app)
    open_a_queue_with_jobs(app, connection)
    show_progress_of_jobs(app, connection)
    show_stoker_in_place_of_workers(app, connection)
    refuse_other_names(app, names)
    refuse_other_sites(app)
    confine_scripts(app)
    escape_job_texts(app)  # its hook runs before that of `confine_scripts`, because Flask calls the last one first
    answer_errors_in_one_line(app, connection)
    return app
