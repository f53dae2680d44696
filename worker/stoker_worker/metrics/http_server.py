"""`/metrics`, `/healthz` and `/readyz` on a loopback port. Threads of its own, one for each request.

A request waits for nothing of the worker's: it reads counts, asks Redis on a connection of its own, and looks at the
store at most every five seconds.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

from stoker_shared.http_guard import LimitedHead, LimitedThreads, host_name, is_private_name
from stoker_worker.metrics.counting import Metrics
from stoker_worker.metrics.exposition import CONTENT_TYPE, exposition
from stoker_worker.metrics.live import LiveFigures
from stoker_worker.metrics.looking import Looking

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
_PLAIN: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN


_OF_ANOTHER_SITE: Final = Answer(HTTPStatus.FORBIDDEN, b"the Host is a name that a web site can have\n")


class Pages:
    """Makes the answers."""

    def __init__(self, metrics: Metrics, live: LiveFigures, looking: Looking, *, stuck_after_s: float) -> None:
        """
        Args:
            stuck_after_s: a step of the engine that takes longer makes the worker not ready.
        """
        self._metrics = metrics
        self._live = live
        self._looking = looking
        self._stuck_after_s = stuck_after_s

    def answer(self, path: str) -> Answer:
        match path.partition("?")[0]:
            case "/healthz":
                return Answer(HTTPStatus.OK, b"the process is up\n")
            case "/readyz":
                obstacles = self._looking.now().obstacles(self._stuck_after_s)
                status = HTTPStatus.SERVICE_UNAVAILABLE if obstacles else HTTPStatus.OK
                return Answer(status, "".join(f"{line}\n" for line in obstacles or ["ready"]).encode())
            case "/metrics":
                look = self._looking.now()
                is_ready = not look.obstacles(self._stuck_after_s)
                body = exposition(self._metrics, self._live, look, is_ready=is_ready)
                return Answer(HTTPStatus.OK, body, CONTENT_TYPE)
        return Answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /healthz and /readyz\n")


class MetricsServer:
    """Serves until it is closed.

    Attributes:
        port: the one it listens on.
    """

    def __init__(self, port: int, answer: Callable[[str], Answer]) -> None:
        """
        Args:
            port: 0 for any that is free.

        Raises:
            OSError: it cannot listen there.
        """
        self._server = _Server((HOST, port), _Handler)
        self._server.answer = answer
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics at http://%s:%d/metrics, health at /healthz and /readyz", HOST, self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(LimitedThreads, HTTPServer):
    answer: Callable[[str], Answer]


class _Handler(LimitedHead, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            is_own = is_private_name(host_name(self.headers.get("Host", "")))
            answer = self.server.answer(self.path) if is_own else _OF_ANOTHER_SITE
        except Exception as error:  # a scrape must not hide the reason in a broken connection
            log.exception("no answer to %s", self.path)
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n".encode())
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each scrape would hide the others."""
