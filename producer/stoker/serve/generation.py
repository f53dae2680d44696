"""The endpoints /v1/chat/completions and /v1/completions: a call's answer, whole or as a stream.

Thinking and text are streamed as they are generated; calls of tools, several choices, and answers with
log-probabilities at the end.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from stoker.openai.answers import answer_body
from stoker.openai.fields import TEXT_URL
from stoker.serve.backend import Backend
from stoker.serve.call import Call
from stoker.serve.chunks import Chunks
from stoker.serve.deltas import Deltas
from stoker.serve.event_stream import EventStream
from stoker.serve.intake import CallHead
from stoker.serve.responses import CLIENT_IS_GONE, REQUEST_ID, Json, described, failed, received, until_hung_up


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
    for event in chunks.rest(await call.result(), deltas):
        yield event
