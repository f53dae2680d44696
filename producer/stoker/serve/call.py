"""One HTTP call and its job: from the body to the ticket, and to the end of both. Owns the job while the call lasts.

A client that hangs up cancels its job, unless the call has an ``Idempotency-Key``: its client can come back for the
answer with the same key.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from starlette.datastructures import Headers

from stoker.async_ticket import AsyncTicket
from stoker.job_options import require_job_id
from stoker.openai.failures import Failure
from stoker.openai.fields import request_fields
from stoker.serve.backend import Backend
from stoker_shared.errors import StokerError
from stoker_shared.result import GenerationResult

AGENT_HEADER: Final = "x-stoker-agent"
CONTEXT_HEADER: Final = "x-stoker-context"
KEY_HEADER: Final = "idempotency-key"
_KEPT_S: Final = 3600
"""How long the job stays in Redis after its end, in seconds."""


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


def fields_of(url: str, body: Mapping[str, Any], headers: Headers, backend: Backend) -> dict[str, Any]:
    """The fields of the request; a header wins over the body.

    Raises:
        FieldRefused: a field cannot be served.
    """
    fields = request_fields(url, body, backend.settings.body_options)
    for header, name in ((AGENT_HEADER, "agent_id"), (CONTEXT_HEADER, "context")):
        if (value := headers.get(header)) is not None:
            fields[name] = _as_utf8(value)
    return fields


def _as_utf8(value: str) -> str:
    """A header's text; HTTP itself gives each byte as a character."""
    raw = value.encode("latin-1")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return value


class Call:
    """
    Attributes:
        fields: the request's fields.
        ticket: the job.
    """

    def __init__(self, backend: Backend, owner: str, place: str, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.ticket: AsyncTicket
        self._backend = backend
        self._owner = owner
        self._place = place
        self._must_cancel = False
        self._has_left = False

    @classmethod
    async def begin(cls, backend: Backend, owner: str, fields: Mapping[str, Any], key: str | None) -> Self:
        """Enqueue the job.

        Args:
            key: the job's id, chosen by the client.

        Raises:
            Failure: no worker, or too many calls in flight.
            RequestError: the request is refused, or `key` names another job.
            RedisUnavailable: no server answers.
        """
        if key is not None:
            require_job_id("Idempotency-Key", key)
        await backend.require_worker()
        call = cls(backend, owner, await backend.take_place(owner), fields)
        timeout_s = backend.settings.timeout_s
        options = {
            "job_timeout_s": timeout_s,
            "ttl_s": timeout_s + _KEPT_S,
            "result_ttl_s": _KEPT_S,
            "failure_ttl_s": _KEPT_S,
        }
        try:
            call.ticket = await backend.producer.submit(job_id=key, **options, **fields)  # type: ignore[arg-type]
        except BaseException:
            await call._leave()
            raise
        call._must_cancel = key is None
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
