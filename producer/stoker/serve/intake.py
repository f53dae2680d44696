"""From the bytes of a call to the job that is ready for the queue. Owns the thread and the process that do this work.

No other thread of Python runs while its JSON parser, its JSON writer and pydantic do, so a large body is read in
another process. Otherwise nothing would be answered meanwhile, not even a health check.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final, Self

from starlette.datastructures import Headers

from stoker.new_job import JobOptions, NewJob, require_job_id
from stoker.openai.answers import Failure, of_exception
from stoker.openai.fields import BodyOptions, FieldRefused, request_fields
from stoker.serve.responses import json_object
from stoker.serve.settings import ServeSettings
from stoker_shared.errors import RequestError
from stoker_shared.request import build_request

AGENT_HEADER: Final = "x-stoker-agent"
CONTEXT_HEADER: Final = "x-stoker-context"
KEY_HEADER: Final = "idempotency-key"
_KEPT_S: Final = 3600
"""How long the job stays in Redis after its end, in seconds."""

_SMALL_BYTES: Final = 256 * 2**10
"""Up to this size, the parser runs for some milliseconds."""


@dataclass(frozen=True)
class StreamWish:
    """
    Attributes:
        wanted: the answer is to be streamed.
        with_usage: the last event has the token counts.
    """

    wanted: bool = False
    with_usage: bool = False

    @classmethod
    def taken_from(cls, body: dict[str, Any]) -> Self:
        """Remove the two fields that concern only the transport, and read them.

        Raises:
            Failure: one of them is invalid, or the body asks for what a stream does not carry.
        """
        wanted, options = body.pop("stream", None) or False, body.pop("stream_options", None)
        if not isinstance(wanted, bool):
            raise Failure(400, "'stream' is not true or false", code="invalid_value", param="stream")
        if options is not None and (not wanted or not isinstance(options, dict)):
            message = "'stream_options' must be an object, and needs 'stream': true"
            raise Failure(400, message, code="invalid_value", param="stream_options")
        if wanted and body.get("prompt_logprobs") is not None:
            message = "'prompt_logprobs' has no place in a stream: ask without 'stream'"
            raise Failure(400, message, code="unsupported_parameter", param="prompt_logprobs")
        return cls(wanted, bool((options or {}).get("include_usage")))


@dataclass(frozen=True)
class CallHead:
    """The parts of a call that are outside of its body.

    Attributes:
        fields: of the request, from headers; they win over the body's.
        key: the job's id, chosen by the client.
    """

    url: str
    fields: Mapping[str, str]
    key: str | None

    @classmethod
    def of(cls, url: str, headers: Headers) -> Self:
        names = ((AGENT_HEADER, "agent_id"), (CONTEXT_HEADER, "context"))
        fields = {name: _as_utf8(value) for header, name in names if (value := headers.get(header)) is not None}
        return cls(url, fields, headers.get(KEY_HEADER))


@dataclass(frozen=True)
class CallJob:
    """A call that is valid, and its job, which is in no queue yet.

    Attributes:
        is_keyed: its client chose the job's id.
        model: as the call names it.
        has_one_text: the answer is one text that can be streamed as it is generated.
    """

    job: NewJob
    is_keyed: bool
    wish: StreamWish
    model: str
    has_one_text: bool


def call_job(raw: list[bytes], head: CallHead, options: BodyOptions, queue: str, timeout_s: int) -> CallJob:
    """
    Args:
        raw: the body; it is taken out, so that no caller keeps it in memory.

    Raises:
        Failure: the call is refused.
    """
    try:
        body = json_object(raw.pop())
        wish = StreamWish.taken_from(body)
        if head.key is not None:
            require_job_id("Idempotency-Key", head.key)
        request = build_request({**request_fields(head.url, body, options), **head.fields})
        kept = JobOptions(
            job_timeout_s=timeout_s, ttl_s=timeout_s + _KEPT_S, result_ttl_s=_KEPT_S, failure_ttl_s=_KEPT_S
        )
        job = NewJob(request, kept, queue, head.key)
    except (FieldRefused, RequestError) as error:
        raise of_exception(error) from None
    has_one_text = request.n == 1 and not request.logprobs
    return CallJob(job, head.key is not None, wish, str(body.get("model")), has_one_text)


class Intake:
    """For one event loop."""

    def __init__(self, settings: ServeSettings) -> None:
        self._call_job = partial(
            call_job, options=settings.body_options, queue=settings.queue, timeout_s=settings.timeout_s
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._process: ProcessPoolExecutor | None = None
        self._one_large = asyncio.Lock()

    async def call_job(self, body: IO[bytes], head: CallHead) -> CallJob:
        """As the function of that name; one large body at a time is in memory.

        Raises:
            Failure: the call is refused, or the process that read it has died.
        """
        if body.seek(0, os.SEEK_END) <= _SMALL_BYTES:
            return await self._in(self._thread, body, head)
        async with self._one_large:
            if self._process is None:
                context = multiprocessing.get_context("spawn")  # a fork would have our connections to Redis
                self._process = ProcessPoolExecutor(1, context, _begin_process)
            try:
                return await self._in(self._process, body, head)
            except BrokenExecutor:
                self._process = None
                message = "the process that reads large bodies has died"
                raise Failure(503, message, kind="server_error", code="intake_died", retryable=True) from None

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.shutdown(cancel_futures=True)

    async def _in(self, executor: Executor, body: IO[bytes], head: CallHead) -> CallJob:
        body.seek(0)
        return await asyncio.get_running_loop().run_in_executor(executor, self._call_job, [body.read()], head)


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()  # also if it was killed


def _as_utf8(value: str) -> str:
    """A header's text; HTTP itself gives each byte as a character."""
    raw = value.encode("latin-1")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return value
