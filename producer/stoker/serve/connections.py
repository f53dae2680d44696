"""Limits the number of connections to `stoker serve` and their time; uvicorn limits only the time between requests.

A request's head has to come within ten seconds, and a mebibyte of its body in each 65; a client has as long to receive
the data sent to it. Above the limit, each new connection closes another: the one that has waited longest without a
request, else the oldest whose request is not complete. So idle clients block nobody, not even a health check.
"""

import asyncio
import errno
import logging
import resource
import time
from dataclasses import dataclass, field
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEAD_S: Final = 10.0
BODY_S: Final = 65.0
"""A little longer than a call waits for its body, so that it can still answer with 408."""
BODY_BYTES: Final = 2**20
MOST_CONNECTIONS: Final = 2048

_READ_BYTES: Final = 64 * 2**10
_READ_BYTES_OF_CHUNKS: Final = 2 * 2**10
"""Read at once of a body in chunks: if each chunk has one byte, h11 needs ten milliseconds for these bytes, in which
nothing else runs."""

_OWN_FILES: Final = 192
"""File descriptors for Redis, the store and the rest. Each connection may need two more: for itself and for its
body."""

_LOG_S: Final = 60.0
_NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass
class Connections:
    """The connections of one server that may be closed to admit another, each in the order in which they came.

    Attributes:
        most: limit of all connections together.
        idle: connections without a complete head of a request.
        sending: connections without a complete body.
    """

    most: int = MOST_CONNECTIONS
    idle: "dict[LimitedProtocol, None]" = field(default_factory=dict)
    sending: "dict[LimitedProtocol, None]" = field(default_factory=dict)


class LimitedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection. For the thread of its event loop."""

    _buffer = memoryview(bytearray(_READ_BYTES))  # of all connections: data is used before more is read

    def __init__(self, all_of_them: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = all_of_them
        self._state = ""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_of_writes: asyncio.TimerHandle | None = None
        self._n_bytes = 0
        self._is_chunked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that `pause_writing` is called for every byte that is not taken
        self._enter("head")
        if len(self.connections) > self._all.most:
            oldest = next(iter(self._all.idle))
            if oldest is self:
                oldest = next(iter(self._all.sending), self)
            oldest.transport.abort()
            oldest._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self.resume_writing()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        is_plain = self._state in {"body", "refused"} and not self._is_chunked
        return self._buffer[: _READ_BYTES if is_plain else _READ_BYTES_OF_CHUNKS]

    def buffer_updated(self, nbytes: int) -> None:
        self._n_bytes += nbytes
        self.data_received(bytes(self._buffer[:nbytes]))
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timer_of_writes = self.loop.call_later(BODY_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._timer_of_writes is not None:
            self._timer_of_writes.cancel()
            self._timer_of_writes = None
        super().resume_writing()

    def _look(self) -> None:
        """Enter the state in which the request is now."""
        state = "answer"
        if self.conn.their_state is h11.IDLE:
            state = "head" if self.conn.trailing_data[0] else "idle"  # uvicorn closes idle ones
        elif self.conn.their_state is h11.SEND_BODY:
            state = "refused" if self.conn.our_state is h11.DONE else "body"
        if state != self._state and not self.transport.is_closing():
            self._enter(state)

    def _enter(self, state: str) -> None:
        self._leave()
        self._state, self._n_bytes = state, 0
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers or ())
        if state in {"idle", "head"}:
            self._all.idle[self] = None
        elif state != "answer":
            self._all.sending[self] = None
        if state in {"head", "body", "refused"}:
            self._timer = self.loop.call_later(BODY_S if state == "body" else HEAD_S, self._end_of_time)

    def _leave(self) -> None:
        self._all.idle.pop(self, None)
        self._all.sending.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_of_time(self) -> None:
        if self._state == "body" and self._n_bytes >= BODY_BYTES:
            self._enter("body")
        else:
            self.transport.abort()


def possible_connections() -> int:
    """The number of connections that the file descriptors of this process allow; raises their limit if needed."""
    wanted = 2 * MOST_CONNECTIONS + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, (soft - _OWN_FILES) // 2))
    )


class LoopErrors:
    """Logs the errors of an event loop. Refused accepts, of which there may be thousands a second, are logged once a
    minute."""

    def __init__(self) -> None:
        self._logged_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_FILES):
            return loop.default_exception_handler(context)
        if time.monotonic() >= self._logged_at + _LOG_S:
            self._logged_at = time.monotonic()
            log.error("connections are refused: %s", error.strerror)
