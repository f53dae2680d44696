"""Guards of the small HTTP servers: no pages of other sites, and a limit of connections, their life and their head.

A page in a browser of this machine can send requests to loopback, and with a name of its own that it points at our
address also read the answers (DNS rebinding). Both show in the headers that browsers send.

The dashboard and the metrics close a connection after each answer, so its whole life is limited. One connection too
many closes the oldest, so idle clients keep nobody out.
"""

import errno
import io
import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Container
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header or an address to listen on, without port and brackets; empty if it is
    none."""
    if host.count(":") > 1 and not host.startswith("["):
        return host
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_own_site(host: str | None, origin: str | None, names: Container[str] = LOOPBACK_NAMES) -> bool:
    """
    Args:
        host, origin: the headers of the request.
        names: in lower case, IPv6 addresses without brackets.
    """
    return host_name(host or "") in names and (not origin or host_name(origin.partition("://")[2]) in names)


def is_private_name(name: str) -> bool:
    """True if no site of the web can have this name: it is an address, has no dot, or ends in ``.internal``."""
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
"""`http.server` itself takes 6.5 MB, and five times as much to parse them."""

_PAUSE_S: Final = 0.1
_LOG_S: Final = 60.0


class LimitedThreads(ThreadingMixIn, _Server):
    """Before the server class. Its connections may be closed at any time, so their handlers must bear `OSError`."""

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
        if not isinstance(sys.exc_info()[1], OSError):  # the client is gone, or has been closed
            super().handle_error(request, client_address)

    def _end(self, request: socket.socket) -> None:
        """Its thread finds it closed, and ends."""
        with self._lock:
            self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _refused(self, error: OSError) -> None:
        """There are no file descriptors; the server tries again at once, hundreds of times a second."""
        if time.monotonic() > self._logged_at + _LOG_S:
            self._logged_at = time.monotonic()
            log.error("connections are refused: %s", error.strerror)
        time.sleep(_PAUSE_S)


class LimitedHead(_Handler):
    """Before the class of the handler."""

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
