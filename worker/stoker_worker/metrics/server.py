"""The metrics of one worker put together, and `/metrics`, `/healthz` and `/readyz` on a loopback port.

The server has a thread for each request. A request waits for nothing of the worker's: it reads counts, asks Redis on a
connection of its own, and looks at the store at most every five seconds.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

from stoker_shared.http_guard import LimitedHead, LimitedThreads, host_name, is_private_name
from stoker_worker.metrics.counters import Metrics
from stoker_worker.metrics.exposition import CONTENT_TYPE, exposition
from stoker_worker.metrics.health import Looking
from stoker_worker.metrics.rates import LiveFigures, RatesLine

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
_PLAIN: Final = "text/plain; charset=utf-8"


class Watch:
    """
    Attributes:
        metrics: for the stages.
        looking: where to look; each part of the worker is named there as soon as it is made. The HTTP server starts
            first, so that a worker that stands by or loads its model has a health check too.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.looking = Looking()
        self._live = LiveFigures(self.metrics, self.looking)
        self._rates = RatesLine(self.metrics, self.looking)

    def figures(self) -> dict[str, Any]:
        """The worker's figures for its heartbeat, which is also the clock of the log's line of rates."""
        self._rates.look()
        return self._live.now()

    @contextmanager
    def served(self, port: int, *, stuck_after_s: float) -> Iterator[int]:
        """Serve as long as the context lasts; yields the port.

        Args:
            port: 0 for any that is free.
            stuck_after_s: a step of the engine that takes longer makes the worker not ready.

        Raises:
            OSError: it cannot listen on the port.
        """
        with _Server((HOST, port), _Handler) as server:
            server.watch, server.stuck_after_s = self, stuck_after_s
            port = int(server.server_address[1])
            threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
            log.info("metrics at http://%s:%d/metrics, health at /healthz and /readyz", HOST, port)
            try:
                yield port
            finally:
                server.shutdown()

    def page(self, path: str, *, stuck_after_s: float) -> tuple[HTTPStatus, str, bytes]:
        """The status, content type and body of the answer."""
        if path == "/healthz":
            return HTTPStatus.OK, _PLAIN, b"the process is up\n"
        if path not in ("/readyz", "/metrics"):
            return HTTPStatus.NOT_FOUND, _PLAIN, b"there are /metrics, /healthz and /readyz\n"
        look = self.looking.now()
        obstacles = look.obstacles(stuck_after_s)
        if path == "/readyz":
            status = HTTPStatus.SERVICE_UNAVAILABLE if obstacles else HTTPStatus.OK
            return status, _PLAIN, "".join(f"{line}\n" for line in obstacles or ["ready"]).encode()
        body = exposition(self.metrics, look, tokens_per_s=self._live.tokens_per_s, is_ready=not obstacles)
        return HTTPStatus.OK, CONTENT_TYPE, body


class _Server(LimitedThreads, HTTPServer):
    watch: Watch
    stuck_after_s: float


class _Handler(LimitedHead, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            status, content_type, body = self._answer()
        except Exception as error:  # a scrape must not hide the reason in a broken connection
            log.exception("no answer to %s", self.path)
            status, content_type = HTTPStatus.INTERNAL_SERVER_ERROR, _PLAIN
            body = f"{type(error).__name__}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> tuple[HTTPStatus, str, bytes]:
        if not is_private_name(host_name(self.headers.get("Host", ""))):
            return HTTPStatus.FORBIDDEN, _PLAIN, b"the Host is a name that a web site can have\n"
        path = self.path.partition("?")[0]
        return self.server.watch.page(path, stuck_after_s=self.server.stuck_after_s)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each scrape would hide the others."""
