"""From the bytes of a call to the jobs that are ready for the queue. Owns the thread and the process that do this work.

No other thread of Python runs while its JSON parser, its JSON writer and pydantic do, so a large body is read in
another process. Otherwise nothing would be answered meanwhile, not even a health check.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any, Final, Self
from uuid import uuid4

from starlette.datastructures import Headers

from stoker.api.endpoint import ApiCall
from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import Failure, FieldRefused, of_exception
from stoker.api.fields import session_name, settle_memory
from stoker.api.responses import messages_of, response_id
from stoker.new_job import JobOptions, NewJob, require_job_id
from stoker.serve.responses import json_object
from stoker.serve.settings import ANYBODY, ServeSettings
from stoker.serve.store import ResponseStore, StoredResponse
from stoker_shared.errors import InvalidRequest, RequestError
from stoker_shared.request import build_request

AGENT_HEADER: Final = "x-stoker-agent"
CONTEXT_HEADER: Final = "x-stoker-context"
KEY_HEADER: Final = "idempotency-key"
_SESSIONS: Final = ("session-id", "x-claude-code-session-id", "x-session-id", "x-stoker-session")
"""The last one that is there counts."""
_KEPT_S: Final = 3600
"""How long the job stays in Redis after its end, in seconds."""

_MOST_KEY_CHARACTERS: Final = 200
"""Of an id of a stored response, which is a folder's name too."""

_BACKGROUND_S: Final = 86_400
"""How long a job may run that nobody waits for, in seconds."""

_SMALL_BYTES: Final = 256 * 2**10
"""Up to this size, the parser runs for some milliseconds."""


@dataclass(frozen=True)
class CallHead:
    """The parts of a call that are outside of its body.

    Attributes:
        fields: of the request, from headers; they win over the body's.
        key: the job's id, chosen by the client.
        owner: the name of the caller's token.
    """

    url: str
    fields: Mapping[str, str]
    key: str | None
    owner: str = ANYBODY

    @classmethod
    def of(cls, url: str, headers: Headers, owner: str) -> Self:
        names = ((AGENT_HEADER, "agent_id"), (CONTEXT_HEADER, "context"), *((name, "session") for name in _SESSIONS))
        fields = {name: _as_utf8(value) for header, name in names if (value := headers.get(header)) is not None}
        return cls(url, fields, headers.get(KEY_HEADER), owner)


@dataclass(frozen=True)
class CallJobs:
    """A call that is valid, and its jobs, which are in no queue yet.

    Attributes:
        jobs: one for each prompt.
        is_keyed: its client chose the jobs' ids.
        call: what was read, without the requests.
        has_one_text: the answer is one text that can be streamed as it is generated.
        model: that the jobs ask for; ``None`` for any.
        has_new_response: its input was stored just now.
    """

    jobs: tuple[NewJob, ...]
    is_keyed: bool
    call: ApiCall
    has_one_text: bool
    model: str | None
    has_new_response: bool


def call_jobs(raw: list[bytes], head: CallHead, settings: ServeSettings) -> CallJobs:
    """
    Args:
        raw: the body; it is taken out, so that no caller keeps it in memory.

    Raises:
        Failure: the call is refused.
    """
    store = settings.response_store()
    try:
        call = ENDPOINTS[head.url].read(json_object(raw.pop()), settings.body_options)
        timeout_s = _BACKGROUND_S if call.is_background else settings.timeout_s
        kept = JobOptions(
            job_timeout_s=timeout_s, ttl_s=timeout_s + _KEPT_S, result_ttl_s=_KEPT_S, failure_ttl_s=_KEPT_S
        )
        # A call that is made again with its key has to be the same request.
        session = uuid4().hex if head.key is None else session_name(head.key)
        if call.continues is not None:
            session = _continue(call, head.owner, store)
        if store is not None and call.is_stored:
            call.requests[0].setdefault("session", session)
        if head.key is not None:
            require_job_id("Idempotency-Key", head.key)
            if len(head.key) > _MOST_KEY_CHARACTERS:
                raise InvalidRequest(f"Idempotency-Key: the limit is {_MOST_KEY_CHARACTERS} characters")
        requests = [build_request(_with_head(fields, head)) for fields in call.requests]
        ids = [head.key and (f"{head.key}-{n}" if n else head.key) for n in range(len(requests))]
        jobs = tuple(
            NewJob(request, kept, settings.queue, job_id) for request, job_id in zip(requests, ids, strict=True)
        )
    except RequestError as error:
        raise of_exception(error) from None
    if store is None and call.is_background:
        raise Failure(400, "'background' needs a store (--batch-store)", code="invalid_value", param="background")
    is_stored = store is not None and call.is_stored
    has_new_response = store is not None and is_stored and _store(store, call, head.owner, jobs[0].job_id, session)
    has_one_text = len(requests) == 1 and requests[0].n == 1 and not requests[0].logprobs
    call = replace(call, requests=(), input=None, is_stored=is_stored)
    return CallJobs(jobs, head.key is not None, call, has_one_text, requests[0].model, has_new_response)


def _with_head(fields: Mapping[str, Any], head: CallHead) -> dict[str, Any]:
    """Callers with tokens of their own share no caches, and no job by its key."""
    known = {**fields, **head.fields}
    if "session" in head.fields:
        known["session"] = session_name(head.fields["session"])
    settle_memory(known)
    if "agent_id" not in known and head.owner != ANYBODY:
        known["cache_salt"] = f"{head.owner} {known.get('cache_salt', '')}"
    elif head.key is not None and head.owner != ANYBODY:
        known["metadata"] = {"token": head.owner}
    return known


def _continue(call: ApiCall, owner: str, store: ResponseStore | None) -> str:
    """Put the conversation before the input; returns its session."""
    assert call.continues is not None
    if store is None:
        raise FieldRefused("previous_response_id", "needs a store (--batch-store)")
    (request,) = call.requests
    before = messages_of(store.conversation(owner, call.continues))
    request["messages"][call.n_instructions : call.n_instructions] = before
    return store.get(owner, call.continues).session


def _store(store: ResponseStore, call: ApiCall, owner: str, job_id: str, session: str) -> bool:
    """Returns whether it was not there before."""
    response = StoredResponse(
        id=response_id(job_id),
        owner=owner,
        created_at=int(time.time()),
        job_id=job_id,
        continues=call.continues,
        session=session,
        is_background=call.is_background,
        input=call.input,
        kept=dict(call.kept),
    )
    try:
        return store.add(response)
    except OSError as error:
        message = f"the response cannot be stored: {error.strerror}"
        raise Failure(503, message, kind="server_error", code="no_space", retryable=True) from None


class Intake:
    """For one event loop."""

    def __init__(self, settings: ServeSettings) -> None:
        self._call_jobs = partial(call_jobs, settings=replace(settings, tokens=None))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._process: ProcessPoolExecutor | None = None
        self._one_large = asyncio.Lock()

    async def call_jobs(self, body: IO[bytes], head: CallHead) -> CallJobs:
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

    async def _in(self, executor: Executor, body: IO[bytes], head: CallHead) -> CallJobs:
        body.seek(0)
        return await asyncio.get_running_loop().run_in_executor(executor, self._call_jobs, [body.read()], head)


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
