"""The endpoints that answer with generated text: a call's answer, whole or as a stream of server-sent events.

Thinking and text are streamed as they are generated; tool calls, several choices, and answers with log-probabilities
come at the end. A client that hangs up cancels its jobs, unless the call has an ``Idempotency-Key``, with which the
client can come back for the answer.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Final, Self

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.api.deltas import Deltas
from stoker.api.endpoint import Endpoint, EventWriter
from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import TOO_LONG, Failure
from stoker.api.responses import RESPONSES, ended_response, response_id
from stoker.serve.backend import Backend
from stoker.serve.intake import CallHead, CallJobs
from stoker.serve.responses import (
    CLIENT_IS_GONE,
    REQUEST_ID,
    Json,
    described,
    failed,
    id_headers,
    received,
    until_hung_up,
)
from stoker.serve.store import ResponseStore
from stoker.tickets import AsyncTicket
from stoker_shared.errors import RedisUnavailable, StokerError
from stoker_shared.result import GenerationResult

log = logging.getLogger(__name__)


class RunningCall:
    """One HTTP call and its jobs, from the body to the end of all.

    Attributes:
        tickets: the jobs; one for each prompt.
        created_s: the answer's `created`, in Unix seconds: when the jobs were enqueued, and for an answer that is not
            streamed, when they ended.
        timeout_s: how long to wait for the results, in seconds; ``None`` in the background.
        may_be_repeated: see `CallJobs`.
    """

    def __init__(self, app: State, made: CallJobs, endpoint: Endpoint, owner: str, place: str) -> None:
        self.tickets: list[AsyncTicket] = []
        self.created_s = int(time.time())
        self.call = made.call
        self.may_be_repeated = made.may_be_repeated
        self.endpoint = endpoint
        self._backend: Backend = app.backend
        self.timeout_s = None if made.call.is_background else self._backend.settings.timeout_s
        self._store: ResponseStore | None = app.background.store if made.call.is_stored else None
        self._owner = owner
        self._place = place
        self._must_cancel = False

    @classmethod
    async def begin(cls, app: State, endpoint: Endpoint, owner: str, made: CallJobs) -> Self:
        """Enqueue the jobs.

        Raises:
            Failure: no worker, too many calls in flight, or no server answers.
            DuplicateJob: the key names another job.
            RedisUnavailable: no server answers.
        """
        backend: Backend = app.backend
        task = asyncio.current_task()
        assert task is not None
        backend.calls.add(task)
        task.add_done_callback(backend.calls.discard)
        await backend.require_worker(made.model)
        running = cls(app, made, endpoint, owner, await backend.take_place(owner))
        try:
            running.tickets = await backend.enqueue(made.jobs, ids_are_new=not made.is_keyed)
        except BaseException as error:
            await running._leave()
            if isinstance(error, RedisUnavailable):
                raise _unavailable(error, running) from None
            raise
        running._must_cancel = not made.is_keyed and not made.call.is_background
        return running

    @property
    def job_id(self) -> str:
        """The first job's id."""
        return self.tickets[0].job_id

    async def results(self) -> list[GenerationResult]:
        """Wait for the results, and store the answer if it is to be stored. Raises `JobError`: a job did not finish, or
        not in time."""
        results = await asyncio.gather(*(ticket.result(self.timeout_s) for ticket in self.tickets))
        self._must_cancel = False
        if not self.call.is_streamed:
            self.created_s = int(time.time())
        if self._store is not None:
            if self.call.is_streamed:
                answer = ended_response(results[0], self.created_s, self.call.kept)
            else:
                answer = self.endpoint.answer(results, self.created_s, self.call.kept)
            try:
                await asyncio.to_thread(self._store.set_answer, response_id(self.job_id), answer)
            except FileNotFoundError:
                pass  # it was deleted meanwhile
            except OSError as error:  # the caller gets its answer all the same
                log.error("the answer of %s cannot be stored: %s", response_id(self.job_id), error)
        return results

    async def end(self) -> None:
        """Cancel the jobs that have not ended, and free the call's place. It completes even if this task is
        canceled."""
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        if self._must_cancel:
            for ticket in self.tickets:
                with suppress(StokerError):
                    await ticket.cancel()
            if self._store is not None:
                await asyncio.to_thread(self._store.remove, response_id(self.job_id))
        await self._leave()

    async def _leave(self) -> None:
        with suppress(StokerError):  # then the place expires
            await self._backend.leave_place(self._owner, self._place)


KEEP_ALIVE_S: Final = 10.0
_RESTART_S: Final = 5


class EventStream(Response):
    """Ends when its client hangs up.

    The status is not sent before the first event: a job that fails before its first token is an HTTP error like any
    other. If the first event takes long, the stream begins without it; a later error is then an event.

    Args:
        running: ended once, however the stream ends.
        begin: the writer's first events, sent by themselves if no other event comes for a while.
        events: the others; an exception becomes a response, or the last events.
    """

    def __init__(
        self,
        running: RunningCall,
        writer: EventWriter,
        begin: Iterator[bytes],
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._running = running
        self._ids = headers
        self._writer = writer
        self._begin = begin
        self._events = events
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_hung_up(receive))
        try:
            await self._send_all(scope, receive, send, gone)
        finally:
            gone.cancel()
            await self._running.end()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send, gone: "asyncio.Future[None]") -> None:
        following = self._next()
        try:
            while True:
                waited_for: set[asyncio.Future[Any]] = {gone, following}
                await asyncio.wait(waited_for, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not following.done():
                    await self._send(send, b"".join(self._begin) + self._writer.keep_alive())
                    continue
                if (sent := following.result()) is None:
                    return await self._send(send, b"", more=False)
                await self._send(send, sent)
                following = self._next()
        except (Exception, asyncio.CancelledError) as error:
            failure = _described(error, self._running)
            is_read_in_events = self._running.endpoint is RESPONSES and failure.error["code"] == TOO_LONG  # by Codex
            if not self._has_begun and not is_read_in_events:
                return await failed(self._running.endpoint, failure, self._ids)(scope, receive, send)
            await self._send(send, b"".join([*self._begin, *self._writer.failed(failure)]), more=False)
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


def _described(error: Exception | asyncio.CancelledError, running: RunningCall) -> Failure:
    """The failure of a call. At a stop, uvicorn cancels calls that take too long."""
    if isinstance(error, asyncio.CancelledError):
        message = "the server stops; ask again"
        return Failure(503, message, code="server_stopping", retryable=True, retry_after_s=_RESTART_S)
    return _unavailable(error, running) if isinstance(error, RedisUnavailable) else described(error)


def _unavailable(error: RedisUnavailable, running: RunningCall) -> Failure:
    """The failure of a call whose job, if the connection was lost, may run all the same."""
    if running.may_be_repeated or not error.is_lost:
        return described(error)
    return Failure(503, f"{error}; the call's job may run all the same", code="queue_unavailable")


async def generate(request: Request) -> Response:
    """Raises `Failure`, `StokerError`, `OSError`: the call is refused."""
    app, owner = request.app.state, request.state.owner
    endpoint = ENDPOINTS[request.url.path]
    async with received(request) as body:
        made = await app.backend.call_jobs(body, CallHead.of(endpoint.url, request.headers, owner))
    try:
        running = await RunningCall.begin(app, endpoint, owner, made)
    except BaseException:
        if made.has_new_response:
            await asyncio.to_thread(app.background.store.remove, response_id(made.jobs[0].job_id))
        raise
    has_one_text, is_new = made.has_one_text, made.has_new_response
    del made  # it has the prompts, which are in Redis now
    headers = id_headers(running.job_id, request.headers.get(REQUEST_ID))
    if running.call.is_background:
        try:
            begun = await app.background.begun(owner, response_id(running.job_id), is_new=is_new)
        except BaseException:
            await running.end()
            raise
        if not running.call.is_streamed:
            await running.end()
            return Json(begun, headers=headers)
    if not running.call.is_streamed:
        return await _answer(request, running, headers)
    writer = endpoint.events(running.job_id, running.call, running.created_s)
    begin, deltas = iter(writer.begin()), Deltas(is_raw=endpoint.is_raw)
    events = _events(app.backend, running, writer, begin, deltas, is_live=has_one_text)
    return EventStream(running, writer, begin, events, headers)


async def _answer(request: Request, running: RunningCall, headers: Mapping[str, str]) -> Response:
    ending = asyncio.ensure_future(running.results())
    gone = asyncio.ensure_future(until_hung_up(request.receive))
    try:
        await asyncio.wait({ending, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return Response(status_code=CLIENT_IS_GONE)
        body = running.endpoint.answer(ending.result(), running.created_s, running.call.kept)
        return Json(body, headers=dict(headers))
    except (Exception, asyncio.CancelledError) as error:
        return failed(running.endpoint, _described(error, running), headers)
    finally:
        ending.cancel()
        gone.cancel()
        await running.end()


async def _events(
    backend: Backend,
    running: RunningCall,
    writer: EventWriter,
    begin: Iterator[bytes],
    deltas: Deltas,
    *,
    is_live: bool,
) -> AsyncGenerator[bytes]:
    """`is_live`: the text may be sent as it is generated."""
    if is_live and not backend.live.locked():  # no await before the place is taken
        ticket = running.tickets[0]
        async with backend.live, aclosing(ticket.stream(running.timeout_s)) as parts:
            async for part in parts:
                for delta in deltas.add(part):
                    for sent in chain(begin, writer.more(delta)):
                        yield sent
    for sent in chain(begin, writer.end(await running.results(), deltas)):
        yield sent
