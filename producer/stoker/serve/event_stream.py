"""A response of server-sent events that ends when its client hangs up. ASGI; owns the connection, not the events.

The status is not sent before the first event: a job that fails before its first token is an HTTP error like any other.
If the first event takes long, the stream begins without it; a later error is then an event.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.serve.chunks import event
from stoker.serve.responses import described, failed, until_hung_up

KEEP_ALIVE_S: Final = 10.0
_COMMENT: Final = b": still waiting\n\n"


class EventStream(Response):
    """
    Args:
        events: each with its line ends; an exception becomes a response, or the last event.
        on_end: called once, however the stream ends.
    """

    def __init__(
        self, events: AsyncGenerator[bytes], headers: Mapping[str, str], on_end: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_hung_up(receive))
        try:
            await self._send_all(scope, receive, send, gone)
        finally:
            gone.cancel()
            await self._on_end()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send, gone: "asyncio.Future[None]") -> None:
        following = self._next()
        try:
            while True:
                waited_for: set[asyncio.Future[Any]] = {gone, following}
                await asyncio.wait(waited_for, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not following.done():
                    await self._send(send, _COMMENT)
                    continue
                if (sent := following.result()) is None:
                    return await self._send(send, b"", more=False)
                await self._send(send, sent)
                following = self._next()
        except Exception as error:
            failure = described(error)
            if not self._has_begun:
                headers = {name: value for name, value in self.headers.items() if name.startswith("x-")}
                return await failed(failure, headers)(scope, receive, send)
            await self._send(send, event(failure.body), more=False)
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await following
            await self._events.aclose()

    def _next(self) -> "asyncio.Future[bytes | None]":
        """The next event; ``None`` after the last."""
        return asyncio.ensure_future(anext(self._events, None))

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": more})
