"""The lines of an output file, in OpenAI's form. Pure.

As at OpenAI, `error` describes a line that has no HTTP response: it could not be run, was canceled, or has expired. A
job that its worker failed has a `response`, with the status that an API would return and an error object as its body.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from stoker.batch.fields import TEXT_URL
from stoker.batch.lines import BadLine
from stoker_shared.errors import AgentTranscriptUnreadable, RequestError, class_named
from stoker_shared.result import GenerationResult, TokenLogprob

# By the name of the worker's error: (status, type, code)
_SERVER_ERROR: Final = (500, "server_error", None)
_FAILURES: Final[Mapping[str, tuple[int, str, str | None]]] = {
    "ModelMismatch": (404, "invalid_request_error", "model_not_found"),
    "ContextLimitExceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "AgentVersionConflict": (409, "conflict_error", "agent_version_conflict"),
    "GenerationTimedOut": (504, "timeout_error", "generation_timed_out"),
}
_REQUEST_ERRORS: Final = (RequestError, AgentTranscriptUnreadable)


def success(line_id: str, custom_id: str, url: str, created_s: int, result: GenerationResult) -> dict[str, Any]:
    """The line of a job that finished.

    Args:
        line_id: the line's `id`, as `answer_id_for`.
        created_s: when the answer was made, in Unix seconds.
    """
    make = _text_completion if url == TEXT_URL else _chat_completion
    response = {"status_code": 200, "request_id": result.job_id, "body": make(created_s, result)}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": None}


def failure(line_id: str, custom_id: str, job_id: str, reason: str, partial_text: str | None) -> dict[str, Any]:
    """The line of a job that its worker failed.

    Args:
        reason: the worker's one line, ``ErrorName: message``.
        partial_text: the text that a job generated before it timed out, else ``None``.
    """
    kind = reason.partition(":")[0]
    is_callers = issubclass(class_named(kind) or Exception, _REQUEST_ERRORS)
    default = (400, "invalid_request_error", "invalid_value") if is_callers else _SERVER_ERROR
    status, error_type, code = _FAILURES.get(kind, default)
    error: dict[str, Any] = {"message": reason, "type": error_type, "param": None, "code": code}
    if partial_text is not None:
        error["partial_text"] = partial_text
    response = {"status_code": status, "request_id": job_id, "body": {"error": error}}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": None}


def not_run(line_id: str, bad: BadLine) -> dict[str, Any]:
    """The line of an input line that could not be run."""
    error = {"code": bad.code, "line": bad.number, "message": str(bad), "param": bad.param}
    return {"id": line_id, "custom_id": bad.custom_id, "response": None, "error": error}


def to_bytes(answer: Mapping[str, Any]) -> bytes:
    """The answer as one line, with its line end."""
    return (
        json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")
        + b"\n"
    )


def is_success(answer: Mapping[str, Any]) -> bool:
    return answer["response"] is not None and answer["response"]["status_code"] == 200


def _chat_completion(created_s: int, result: GenerationResult) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": _chat_logprobs(result),
        "finish_reason": result.finish_reason,
    }
    return _body("chatcmpl", "chat.completion", choice, created_s, result)


def _text_completion(created_s: int, result: GenerationResult) -> dict[str, Any]:
    logprobs = _text_logprobs(result.logprobs.content) if result.logprobs is not None else None
    choice = {"index": 0, "text": result.text, "logprobs": logprobs, "finish_reason": result.finish_reason}
    return _body("cmpl", "text_completion", choice, created_s, result)


def _body(prefix: str, kind: str, choice: dict[str, Any], created_s: int, result: GenerationResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "id": f"{prefix}-{result.job_id}",
        "object": kind,
        "created": created_s,
        "model": result.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


def _chat_logprobs(result: GenerationResult) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None
    return {"content": [entry.model_dump(mode="json") for entry in result.logprobs.content], "refusal": None}


def _text_logprobs(entries: list[TokenLogprob]) -> dict[str, Any]:
    """The older form, by columns; a token's offset is the length of the text before it."""
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
