"""Results and errors as OpenAI's response bodies, with their HTTP statuses. Pure.

What OpenAI has no name for has vLLM's: `reasoning_content` in a message, `prompt_logprobs` in the body. `task` and
`attempts` are stoker's own. The statuses make the `openai` package raise its own classes: 400 `BadRequestError`, 401
`AuthenticationError`, 404 `NotFoundError`, 409 `ConflictError`, 429 `RateLimitError`, from 500 on
`InternalServerError`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from stoker.openai.fields import TEXT_URL, FieldRefused
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
from stoker_shared.result import Choice, GenerationResult, Logprobs, TokenLogprob

ID_PREFIX: Final = {True: "cmpl", False: "chatcmpl"}


def answer_body(url: str, created_s: int, result: GenerationResult) -> dict[str, Any]:
    """The body of a successful response.

    Args:
        created_s: when the answer was made, in Unix seconds.
    """
    is_text = url == TEXT_URL
    make = _text_choice if is_text else _chat_choice
    body = {
        "id": f"{ID_PREFIX[is_text]}-{result.job_id}",
        "object": "text_completion" if is_text else "chat.completion",
        "created": created_s,
        "model": result.model,
        "choices": [make(index, choice) for index, choice in enumerate(choices_of(result))],
        "usage": usage_of(result),
    }
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = result.prompt_logprobs.model_dump(mode="json")
    if result.task is not None:
        body["task"] = result.task
    if result.attempts is not None:
        body["attempts"] = [attempt.model_dump(mode="json") for attempt in result.attempts]
    return body


def choices_of(result: GenerationResult) -> Sequence[Choice]:
    return result.choices or [result]


def usage_of(result: GenerationResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def message_of(choice: Choice) -> dict[str, Any]:
    """The assistant's message; its `content` is ``None`` if the model only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.content if choice.content.strip() else None
        message["tool_calls"] = [call.model_dump(mode="json") for call in choice.tool_calls]
    return message


def chat_logprobs(logprobs: Logprobs | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [entry.model_dump(mode="json") for entry in logprobs.content], "refusal": None}


def text_logprobs(logprobs: Logprobs | None) -> dict[str, Any] | None:
    """The older form, by columns; a token's offset is the length of the text before it."""
    if logprobs is None:
        return None
    entries: list[TokenLogprob] = logprobs.content
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{top.token: top.logprob for top in entry.top_logprobs} for entry in entries],
        "text_offset": offsets,
    }


def _chat_choice(index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "message": message_of(choice),
        "logprobs": chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    logprobs = text_logprobs(choice.logprobs)
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


_SERVER_ERROR: Final = (500, "server_error", None)
_FAILURES: Final[Mapping[str, tuple[int, str, str | None]]] = {
    "ModelMismatch": (404, "invalid_request_error", "model_not_found"),
    "ContextLimitExceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "AgentNotFound": (404, "invalid_request_error", "agent_not_found"),
    "AgentVersionConflict": (409, "conflict_error", "agent_version_conflict"),
    "GenerationTimedOut": (504, "timeout_error", "generation_timed_out"),
}
"""Status, type and code, by the name of the worker's error."""

_REQUEST_ERRORS: Final = (RequestError, AgentTranscriptUnreadable)


class Failure(Exception):
    """An error as an HTTP response.

    Attributes:
        status: the HTTP status.
        retryable: whether the same request may well succeed later.
        retry_after_s: when to try again, if that is known.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retryable: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}

    def __reduce__(self) -> tuple[Callable[[], "Failure"], tuple[()], dict[str, Any]]:
        """`stoker serve` reads large bodies in another process, whose failures come back."""
        return partial(Failure, self.status, str(self)), (), vars(self)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}


def of_worker(reason: str, partial_text: str | None) -> Failure:
    """The failure of a job that its worker failed.

    Args:
        reason: the worker's one line, ``ErrorName: message``.
        partial_text: the text that a job generated before it timed out, else ``None``.
    """
    name = reason.partition(":")[0]
    error = class_named(name) or StokerError
    default = (400, "invalid_request_error", "invalid_value") if issubclass(error, _REQUEST_ERRORS) else _SERVER_ERROR
    status, kind, code = _FAILURES.get(name, default)
    failure = Failure(status, reason, kind=kind, code=code, retryable=error.retryable)
    if partial_text is not None:
        failure.error["partial_text"] = partial_text
    return failure


def of_request(error: RequestError) -> Failure:
    """The failure of a request that is invalid or too large, or whose id is taken."""
    if isinstance(error, DuplicateJob):
        return Failure(409, str(error), kind="conflict_error", code="duplicate_job")
    if isinstance(error, RequestTooLarge):
        return Failure(413, str(error), code="request_too_large")
    return Failure(400, str(error), code="invalid_value", param=field_of(error))


def field_of(error: RequestError) -> str | None:
    """The field that the error's message begins with, if it begins with one."""
    found = re.match("'?([a-z_]+)", str(error))
    return found[1] if found and found[1] in GenerationRequest.model_fields else None


def of_exception(error: Exception) -> Failure:
    """The failure that describes an error of this package to an HTTP client; any other is an error of the server."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, FieldRefused):
        return Failure(400, str(error), code=error.code, param=error.param)
    if isinstance(error, RequestError):
        return of_request(error)
    if isinstance(error, JobFailed):
        return of_worker(error.reason, error.partial_text)
    if isinstance(error, JobCanceled):
        return Failure(409, str(error), kind="conflict_error", code="job_canceled")
    if isinstance(error, ResultTimeout):
        return Failure(504, str(error), kind="timeout_error", code="generation_timed_out")
    if isinstance(error, RedisUnavailable):
        return Failure(503, str(error), kind="server_error", code="queue_unavailable", retryable=True, retry_after_s=5)
    if isinstance(error, StokerError):
        return Failure(500, str(error), kind="server_error", retryable=error.retryable)
    return Failure(500, "internal error; the log has it", kind="server_error")
