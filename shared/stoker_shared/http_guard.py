"""Guards for the small HTTP servers: against requests of other sites' pages, and limits for the number of connections,
for how long each lasts, and for the size of a request's head.

A page in a browser of this machine can send requests to loopback. If its own host name points at our address, it can
read the answers too (DNS rebinding). The headers that browsers send show both.

The dashboard and the metrics close a connection after each answer, so each connection has a time limit. A connection
over the limit closes the oldest one, so that idle clients block nobody.
"""

import errno
import io
import ipaddress
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header or an address to listen on, without port and brackets; empty if it has
    none."""
    if host.count(":") > 1 and not host.startswith("["):
        return host
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_own_site(host: str | None, origin: str | None) -> bool:
    """Whether these headers of a request, `host` and `origin`, name this server by a name of loopback."""
    named = [host or "", origin.partition("://")[2]] if origin else [host or ""]
    return all(host_name(name) in LOOPBACK_NAMES for name in named)


def is_private_name(name: str) -> bool:
    """True if no public site can have this name: it is an address, has no dot, or ends in ``.internal``."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name.endswith(".internal"))
    return True


if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler as _Handler
    from socketserver import TCPServer as _Server
else:
    _Handler = _Server = object

log = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 32
LIFE_S: Final = 30.0
HEAD_BYTES: Final = 16 * 2**10
"""`http.server` itself accepts 6.5 MB, and needs five times as much to parse them."""

_PAUSE_S: Final = 0.1
_LOG_S: Final = 60.0


class LimitedThreads(ThreadingMixIn, _Server):
    """A mixin, listed before the server class. It may close a connection at any time, so handlers must expect
    `OSError`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        super().__init__(*arguments, **options)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                self._refused(error)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            oldest = next(iter(self._open)) if len(self._open) > MOST_CONNECTIONS else None
        if oldest is not None:
            self._end(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        super().service_actions()
        with self._lock:
            late = [request for request, since in self._open.items() if time.monotonic() > since + LIFE_S]
        for request in late:
            self._end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client is gone, or the connection was closed here
            super().handle_error(request, client_address)

    def _end(self, request: socket.socket) -> None:
        """The connection's thread finds it closed, and ends."""
        with self._lock:
            self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _refused(self, error: OSError) -> None:
        """No file descriptor is free: wait, because the server would try again at once, hundreds of times a second."""
        if time.monotonic() > self._logged_at + _LOG_S:
            self._logged_at = time.monotonic()
            log.error("connections are refused: %s", error.strerror)
        time.sleep(_PAUSE_S)


class LimitedHead(_Handler):
    """A mixin, listed before the handler class."""

    def parse_request(self) -> bool:
        head, rest = b"", self.rfile
        while not head.endswith((b"\n\r\n", b"\n\n")) and head not in (b"\r\n", b"\n"):
            line = rest.readline(HEAD_BYTES)
            head += line
            if not line or len(head) > HEAD_BYTES:
                self.close_connection = True
                return False
        self.rfile = io.BytesIO(head)
        try:
            return super().parse_request()
        finally:
            self.rfile = rest
