"""From the bytes of a call to jobs that are ready for the queue. Any thread; the largest body takes half a second."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from uuid import uuid4

from starlette.datastructures import Headers

from stoker.api.endpoint import ApiCall
from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import Failure
from stoker.api.fields import keep_apart, session_name, settle_memory
from stoker.api.responses import RESPONSES, messages_of, response_id
from stoker.new_job import JobOptions, NewJob, require_job_id
from stoker.serve.responses import json_object
from stoker.serve.settings import ANYBODY, ServeSettings
from stoker.serve.store import ResponseStore, StoredResponse
from stoker_shared.errors import InvalidRequest
from stoker_shared.request import build_request

AGENT_HEADER: Final = "x-stoker-agent"
CONTEXT_HEADER: Final = "x-stoker-context"
KEY_HEADER: Final = "idempotency-key"
_SESSIONS: Final = ("session-id", "x-claude-code-session-id", "x-session-id", "x-stoker-session")
"""Of several headers, the last one in this order counts."""
_KEPT_S: Final = 3600
"""How long the job stays in Redis after its end, in seconds."""

_MOST_KEY_CHARACTERS: Final = 200
"""Limit for the id of a stored response, which is also a folder's name."""

_BACKGROUND_S: Final = 86_400
"""How long a background job may run, in seconds."""


@dataclass(frozen=True)
class CallHead:
    """The parts of a call that are outside of its body.

    Attributes:
        fields: request fields from headers; they take precedence over the body's.
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
    """A valid call, and its jobs, which are in no queue yet.

    Attributes:
        jobs: one for each prompt.
        is_keyed: its client chose the jobs' ids.
        may_be_repeated: also while it is unknown whether its jobs run. Not a call of an agent without a key: the agent
            might get the turn twice.
        call: the call as read, without the requests.
        has_one_text: the answer is one text that can be streamed as it is generated.
        model: the model that the jobs ask for; ``None`` for any.
        has_new_response: its input was stored just now.
    """

    jobs: tuple[NewJob, ...]
    is_keyed: bool
    may_be_repeated: bool
    call: ApiCall
    has_one_text: bool
    model: str | None
    has_new_response: bool


def call_jobs(raw: bytes, head: CallHead, settings: ServeSettings) -> CallJobs:
    """The jobs of a call with the body `raw`. Raises `Failure`, `RequestError`: the call is refused; `OSError`."""
    store = ResponseStore(settings.batch_store)
    body = json_object(raw, settings.max_body_bytes)
    if head.url == RESPONSES.url and isinstance(body.get("input"), list):
        body["input"] = store.dereferenced(head.owner, body["input"])
    call = ENDPOINTS[head.url].read(body, settings.body_options)
    timeout_s = _BACKGROUND_S if call.is_background else settings.timeout_s
    kept = JobOptions(job_timeout_s=timeout_s, ttl_s=timeout_s + _KEPT_S, result_ttl_s=_KEPT_S, failure_ttl_s=_KEPT_S)
    # A call repeated with its key has to be the same request.
    session = uuid4().hex if head.key is None else session_name(head.key)
    if call.continues is not None:
        session = _continue(call, head.owner, store)
    if call.is_stored:
        call.requests[0].setdefault("session", session)
    if head.key is not None:
        require_job_id("Idempotency-Key", head.key)
        if len(head.key) > _MOST_KEY_CHARACTERS:
            raise InvalidRequest(f"Idempotency-Key: the limit is {_MOST_KEY_CHARACTERS} characters")
    requests = [build_request(_with_head(fields, head)) for fields in call.requests]
    ids = [head.key and (f"{head.key}-{n}" if n else head.key) for n in range(len(requests))]
    jobs = tuple(NewJob(request, kept, settings.queue, job_id) for request, job_id in zip(requests, ids, strict=True))
    session = requests[0].session or session
    has_new_response = call.is_stored and _store(store, call, head.owner, jobs[0].job_id, session)
    if head.key is not None and not call.is_stored and store.read(response_id(head.key)) is not None:
        raise _names_another(head.key)
    has_one_text = len(requests) == 1 and requests[0].n == 1 and not requests[0].logprobs
    call = replace(call, requests=(), input=None)
    is_keyed = head.key is not None
    may_be_repeated = is_keyed or requests[0].agent_id is None
    return CallJobs(jobs, is_keyed, may_be_repeated, call, has_one_text, requests[0].model, has_new_response)


def _with_head(fields: Mapping[str, Any], head: CallHead) -> dict[str, Any]:
    """Adds the headers' fields. Callers whose tokens have different names share no caches, and a job's key works only
    for one name."""
    known = {**fields, **head.fields}
    if "session" in head.fields:
        known["session"] = session_name(head.fields["session"])
    settle_memory(known)
    if head.owner != ANYBODY:
        keep_apart(known, head.owner)
        if head.key is not None and "agent_id" in known:
            known["metadata"] = {"token": head.owner}
    return known


def _continue(call: ApiCall, owner: str, store: ResponseStore) -> str:
    """Put the conversation before the input; returns its session."""
    assert call.continues is not None
    (request,) = call.requests
    before = messages_of(store.conversation(owner, call.continues))
    request["messages"][call.n_instructions : call.n_instructions] = before
    return store.get(owner, call.continues).session


def _store(store: ResponseStore, call: ApiCall, owner: str, job_id: str, session: str) -> bool:
    """Returns whether the response is new. Raises `OSError`: it cannot be stored; `Failure`: its key is that of another
    call's response. Redis refuses such a call too, but only as long as it has the other call's job."""
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
    is_new = store.add(response)
    earlier = None if is_new else store.read(response.id)
    if earlier is not None and _asked(earlier) != _asked(response):
        raise _names_another(job_id)
    return is_new


def _names_another(key: str) -> Failure:
    return Failure(409, f"Idempotency-Key: {key!r} names another response already", code="duplicate_job")


def _asked(response: StoredResponse) -> tuple[Any, ...]:
    return response.owner, response.continues, response.input


def _as_utf8(value: str) -> str:
    """A header's text; HTTP itself gives each byte as a character."""
    raw = value.encode("latin-1")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return value
