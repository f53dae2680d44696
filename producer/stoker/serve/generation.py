"""The endpoints /v1/chat/completions and /v1/completions: a call's answer, whole or as a stream of server-sent events.

Thinking and text are streamed as they are generated; calls of tools, several choices, and answers with
log-probabilities at the end. A client that hangs up cancels its job, unless the call has an ``Idempotency-Key``: its
client can come back for the answer with the same key.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.openai.answers import answer_body
from stoker.openai.fields import TEXT_URL
from stoker.serve.backend import Backend
from stoker.serve.chunks import Chunks, Deltas, event
from stoker.serve.intake import CallHead, CallJob
from stoker.serve.responses import CLIENT_IS_GONE, REQUEST_ID, Json, described, failed, received, until_hung_up
from stoker.tickets import AsyncTicket
from stoker_shared.errors import StokerError
from stoker_shared.result import GenerationResult


class Call:
    """One HTTP call and its job, from the body to the end of both.

    Attributes:
        ticket: the job.
    """

    def __init__(self, backend: Backend, owner: str, place: str) -> None:
        self.ticket: AsyncTicket
        self._backend = backend
        self._owner = owner
        self._place = place
        self._must_cancel = False
        self._has_left = False

    @classmethod
    async def begin(cls, backend: Backend, owner: str, made: CallJob) -> Self:
        """Enqueue the job.

        Raises:
            Failure: no worker, or too many calls in flight.
            DuplicateJob: the key names another job.
            RedisUnavailable: no server answers.
        """
        await backend.require_worker()
        call = cls(backend, owner, await backend.take_place(owner))
        try:
            call.ticket = await backend.enqueue(made.job, id_is_new=not made.is_keyed)
        except BaseException:
            await call._leave()
            raise
        call._must_cancel = not made.is_keyed
        return call

    async def result(self) -> GenerationResult:
        """
        Raises:
            JobError: the job did not finish, or not in time.
        """
        result = await self.ticket.result(self._backend.settings.timeout_s)
        self._must_cancel = False
        return result

    async def end(self) -> None:
        """Cancel the job unless it has ended, and let the next call in. It finishes even if this task is canceled."""
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        with suppress(StokerError):
            if self._must_cancel:
                await self.ticket.cancel()
        await self._leave()

    async def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            with suppress(StokerError):  # then the place expires
                await self._backend.leave_place(self._owner, self._place)


KEEP_ALIVE_S: Final = 10.0
_COMMENT: Final = b": still waiting\n\n"


class EventStream(Response):
    """Ends when its client hangs up.

    The status is not sent before the first event: a job that fails before its first token is an HTTP error like any
    other. If the first event takes long, the stream begins without it; a later error is then an event.

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


async def generate(request: Request) -> Response:
    """
    Raises:
        Failure, FieldRefused, StokerError: the call is refused; nothing was enqueued.
    """
    backend: Backend = request.app.state.backend
    url = request.url.path
    async with received(request) as body:
        made = await backend.intake.call_job(body, CallHead.of(url, request.headers))
    call = await Call.begin(backend, request.state.owner, made)
    headers, wish, model, is_one = {REQUEST_ID: call.ticket.job_id}, made.wish, made.model, made.has_one_text
    del made  # with the prompt, which is in Redis now
    if not wish.wanted:
        return await _answer(request, call, url, headers)
    chunks = Chunks(call.ticket.job_id, model, int(time.time()), url == TEXT_URL, wish.with_usage)
    return EventStream(_events(backend, call, chunks, is_one=is_one), headers, call.end)


async def _answer(request: Request, call: Call, url: str, headers: dict[str, str]) -> Response:
    ending = asyncio.ensure_future(call.result())
    gone = asyncio.ensure_future(until_hung_up(request.receive))
    try:
        await asyncio.wait({ending, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return Response(status_code=CLIENT_IS_GONE)
        return Json(answer_body(url, int(time.time()), ending.result()), headers=headers)
    except Exception as error:
        return failed(described(error), headers)
    finally:
        ending.cancel()
        gone.cancel()
        await call.end()


async def _events(backend: Backend, call: Call, chunks: Chunks, *, is_one: bool) -> AsyncGenerator[bytes]:
    deltas = Deltas(is_text=chunks.is_text)
    if is_one and not backend.live.locked():  # no await before the place is taken
        async with backend.live, aclosing(call.ticket.stream(backend.settings.timeout_s)) as parts:
            async for part in parts:
                for delta in deltas.add(part):
                    yield chunks.more(delta)
    for last in chunks.rest(await call.result(), deltas):
        yield last
