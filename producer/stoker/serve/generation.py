"""The endpoints that answer with generated text: a call's answer, whole or as a stream of server-sent events.

Thinking and text are streamed as they are generated; calls of tools, several choices, and answers with
log-probabilities at the end. A client that hangs up cancels its jobs, unless the call has an ``Idempotency-Key``: its
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

from stoker.api.deltas import Deltas
from stoker.api.endpoint import ApiCall, Endpoint, EventWriter
from stoker.api.endpoints import ENDPOINTS
from stoker.serve.backend import Backend
from stoker.serve.intake import CallHead, CallJobs
from stoker.serve.responses import CLIENT_IS_GONE, REQUEST_ID, Json, described, failed, received, until_hung_up
from stoker.tickets import AsyncTicket
from stoker_shared.errors import StokerError
from stoker_shared.result import GenerationResult


class Call:
    """One HTTP call and its jobs, from the body to the end of all.

    Attributes:
        tickets: the jobs; one for each prompt.
    """

    def __init__(self, backend: Backend, owner: str, place: str) -> None:
        self.tickets: list[AsyncTicket] = []
        self._backend = backend
        self._owner = owner
        self._place = place
        self._must_cancel = False
        self._has_left = False

    @classmethod
    async def begin(cls, backend: Backend, owner: str, made: CallJobs) -> Self:
        """Enqueue the jobs.

        Raises:
            Failure: no worker, or too many calls in flight.
            DuplicateJob: the key names another job.
            RedisUnavailable: no server answers.
        """
        await backend.require_worker()
        call = cls(backend, owner, await backend.take_place(owner))
        try:
            call.tickets = await backend.enqueue(made.jobs, ids_are_new=not made.is_keyed)
        except BaseException:
            await call._leave()
            raise
        call._must_cancel = not made.is_keyed
        return call

    async def results(self) -> list[GenerationResult]:
        """
        Raises:
            JobError: a job did not finish, or not in time.
        """
        timeout_s = self._backend.settings.timeout_s
        results = await asyncio.gather(*(ticket.result(timeout_s) for ticket in self.tickets))
        self._must_cancel = False
        return results

    async def end(self) -> None:
        """Cancel the jobs that have not ended, and let the next call in. It finishes even if this task is canceled."""
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        for ticket in self.tickets if self._must_cancel else ():
            with suppress(StokerError):
                await ticket.cancel()
        await self._leave()

    async def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            with suppress(StokerError):  # then the place expires
                await self._backend.leave_place(self._owner, self._place)


KEEP_ALIVE_S: Final = 10.0


class EventStream(Response):
    """Ends when its client hangs up.

    The status is not sent before the first event: a job that fails before its first token is an HTTP error like any
    other. If the first event takes long, the stream begins without it; a later error is then an event.

    Args:
        events: of the writer; an exception becomes a response, or the last events.
        on_end: called once, however the stream ends.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        writer: EventWriter,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._endpoint = endpoint
        self._writer = writer
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
                    await self._send(send, self._writer.keep_alive)
                    continue
                if (sent := following.result()) is None:
                    return await self._send(send, b"", more=False)
                await self._send(send, sent)
                following = self._next()
        except Exception as error:
            failure = described(error)
            if not self._has_begun:
                headers = {name: value for name, value in self.headers.items() if name.startswith("x-")}
                return await failed(self._endpoint, failure, headers)(scope, receive, send)
            await self._send(send, b"".join(self._writer.failed(failure)), more=False)
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
            body = b"".join(self._writer.begin()) + body
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def generate(request: Request) -> Response:
    """
    Raises:
        Failure, StokerError: the call is refused; nothing was enqueued.
    """
    backend: Backend = request.app.state.backend
    endpoint, owner = ENDPOINTS[request.url.path], request.state.owner
    async with received(request) as body:
        made = await backend.intake.call_jobs(body, CallHead.of(endpoint.url, request.headers, owner))
    running = await Call.begin(backend, owner, made)
    call, has_one_text = made.call, made.has_one_text
    del made  # with the prompts, which are in Redis now
    job_id = running.tickets[0].job_id
    headers = {REQUEST_ID: job_id}
    if not call.is_streamed:
        return await _answer(request, running, endpoint, call, headers)
    writer = endpoint.events(job_id, call, int(time.time()))
    events = _events(backend, running, writer, Deltas(is_raw=endpoint.is_raw), is_live=has_one_text)
    return EventStream(endpoint, writer, events, headers, running.end)


async def _answer(
    request: Request, running: Call, endpoint: Endpoint, call: ApiCall, headers: Mapping[str, str]
) -> Response:
    ending = asyncio.ensure_future(running.results())
    gone = asyncio.ensure_future(until_hung_up(request.receive))
    try:
        await asyncio.wait({ending, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return Response(status_code=CLIENT_IS_GONE)
        return Json(endpoint.answer(ending.result(), int(time.time()), call.kept), headers=dict(headers))
    except Exception as error:
        return failed(endpoint, described(error), headers)
    finally:
        ending.cancel()
        gone.cancel()
        await running.end()


async def _events(
    backend: Backend, running: Call, writer: EventWriter, deltas: Deltas, *, is_live: bool
) -> AsyncGenerator[bytes]:
    """
    Args:
        is_live: the text may be sent as it is generated.
    """
    if is_live and not backend.live.locked():  # no await before the place is taken
        ticket = running.tickets[0]
        async with backend.live, aclosing(ticket.stream(backend.settings.timeout_s)) as parts:
            async for part in parts:
                for delta in deltas.add(part):
                    for sent in writer.more(delta):
                        yield sent
    for sent in writer.end(await running.results(), deltas):
        yield sent
