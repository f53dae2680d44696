"""Errors as HTTP statuses and OpenAI's error bodies. Pure.

The statuses make the `openai` package raise its own classes: 400 `BadRequestError`, 401 `AuthenticationError`, 404
`NotFoundError`, 409 `ConflictError`, 429 `RateLimitError`, from 500 on `InternalServerError`.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from stoker_shared.errors import (
    AgentTranscriptUnreadable,
    DuplicateJob,
    JobCanceled,
    JobFailed,
    RedisUnavailable,
    RequestError,
    RequestTooLarge,
    ResultTimeout,
    StokerError,
    class_named,
)
from stoker_shared.request import GenerationRequest

TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code by which clients know that they have to shorten their conversation."""

_FAILURES: Final[Mapping[str, tuple[int, str | None]]] = {
    "ModelMismatch": (404, "model_not_found"),
    **dict.fromkeys(("ContextLimitExceeded", "RequestTooLarge", "BlockPoolTooSmall"), (400, TOO_LONG)),
    "AgentNotFound": (404, "agent_not_found"),
    "AgentVersionConflict": (409, "agent_version_conflict"),
    "GenerationTimedOut": (504, "generation_timed_out"),
}
"""Status and code, by the name of the worker's error."""

_TYPES: Final = {409: "conflict_error", 429: "rate_limit_error", 504: "timeout_error"}
"""By status; other statuses below 500 are `invalid_request_error`, and the rest `server_error`."""


class Failure(Exception):
    """An error as an HTTP response.

    Attributes:
        status: the HTTP status.
        retryable: whether the same request may succeed later.
        retry_after_s: when to try again, if that is known.
        request_id: the id of the call's job, if it has one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retryable: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.request_id: str | None = None
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}


class FieldRefused(Failure):
    """A field that cannot be served; nothing is run. `param` is the field's name, `code` OpenAI's code for such an
    error."""

    def __init__(self, param: str, why: str, code: str = "unsupported_parameter") -> None:
        super().__init__(400, f"'{param}' {why}", code=code, param=param)


def of_worker(reason: str, partial_text: str | None) -> Failure:
    """The failure of a job that its worker failed. `reason` is the worker's line, ``ErrorName: message``;
    `partial_text` the text generated before a timeout."""
    name = reason.partition(":")[0]
    error = class_named(name) or StokerError
    is_refused = issubclass(error, RequestError | AgentTranscriptUnreadable)
    status, code = _FAILURES.get(name, (400, "invalid_value") if is_refused else (500, None))
    failure = Failure(status, reason, code=code, retryable=error.retryable)
    if partial_text is not None:
        failure.error["partial_text"] = partial_text
    return failure


def _field_of(error: RequestError) -> str | None:
    """The field with which the error's message begins, if it begins with one."""
    found = re.match("'?([a-z_]+)", str(error))
    return found[1] if found and found[1] in GenerationRequest.model_fields else None


def of_exception(error: Exception) -> Failure:
    """The failure that describes an error of this package to an HTTP client; any other is an error of the server."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, DuplicateJob):
        return Failure(409, str(error), code="duplicate_job")
    if isinstance(error, RequestTooLarge):
        return Failure(413, str(error), code="request_too_large")
    if isinstance(error, RequestError):
        return Failure(400, str(error), code="invalid_value", param=_field_of(error))
    if isinstance(error, JobFailed):
        return of_worker(error.reason, error.partial_text)
    if isinstance(error, JobCanceled):
        return Failure(409, str(error), code="job_canceled")
    if isinstance(error, ResultTimeout):
        message = str(error).replace("; it is not canceled", "")  # a server may cancel it
        return Failure(504, message, code="generation_timed_out")
    if isinstance(error, RedisUnavailable):
        return Failure(503, str(error), code="queue_unavailable", retryable=True, retry_after_s=5)
    if isinstance(error, StokerError):
        return Failure(500, str(error), retryable=error.retryable)
    return Failure(500, "internal error; the log has it")
