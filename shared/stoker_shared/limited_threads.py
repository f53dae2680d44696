"""How many clients may connect to a server with a thread for each connection, for how long, and with how long a head.

The dashboard's server and that of the metrics close a connection after each answer, so its whole life is limited. One
connection too many closes the oldest, so idle clients keep nobody out.
"""

import errno
import io
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final

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
