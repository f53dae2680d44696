"""The endpoints /v1/chat/completions and /v1/completions: a call's answer, whole or as a stream.

The text is streamed as it is generated only where it is the whole answer. With tools, thinking, several choices, or
log-probabilities, the parts of the answer are known at its end, and are sent then.
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
from stoker.serve.call import KEY_HEADER, Call, StreamWish, fields_of
from stoker.serve.chunks import Chunks, SentText
from stoker.serve.event_stream import EventStream
from stoker.serve.responses import CLIENT_IS_GONE, REQUEST_ID, Json, described, failed, json_body, until_hung_up


async def generate(request: Request) -> Response:
    """
    Raises:
        Failure, FieldRefused, StokerError: the call is refused; nothing was enqueued.
    """
    backend: Backend = request.app.state.backend
    url, body = request.url.path, await json_body(request)
    wish = StreamWish.taken_from(body)
    fields = fields_of(url, body, request.headers, backend)
    call = await Call.begin(backend, request.state.owner, fields, request.headers.get(KEY_HEADER))
    headers = {REQUEST_ID: call.ticket.job_id}
    if not wish.wanted:
        return await _answer(request, call, url, headers)
    chunks = Chunks(call.ticket.job_id, str(body.get("model")), int(time.time()), url == TEXT_URL, wish.with_usage)
    return EventStream(_events(backend, call, chunks), headers, call.end)


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


async def _events(backend: Backend, call: Call, chunks: Chunks) -> AsyncGenerator[bytes]:
    if not await _is_its_text(backend, call, chunks) or backend.live.locked():  # no await before the place is taken
        result = await call.result()
        for event in chunks.whole(result):
            yield event
    else:
        async with backend.live, aclosing(_live(backend, call, chunks)) as texts:
            async for event in texts:
                yield event
        result = await call.result()
    for event in chunks.end(result):
        yield event


async def _live(backend: Backend, call: Call, chunks: Chunks) -> AsyncGenerator[bytes]:
    """The text as it is generated."""
    sent = SentText()
    has_begun = False
    async for part in call.ticket.stream(backend.settings.timeout_s):
        if new := sent.add(part):
            if not has_begun and not chunks.is_text:
                yield chunks.begin()
            has_begun = True
            yield chunks.more(new)
    sent.require_all()
    if not has_begun:
        yield chunks.begin()


async def _is_its_text(backend: Backend, call: Call, chunks: Chunks) -> bool:
    """Whether the answer is exactly the text that the model generates."""
    fields = call.fields
    if fields.get("n", 1) != 1 or fields.get("logprobs"):
        return False
    if chunks.is_text:
        return True
    calls_tools = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    return not calls_tools and not await backend.model_thinks()
