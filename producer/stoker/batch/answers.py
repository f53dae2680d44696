"""The lines of an output file, in OpenAI's form. Pure.

As at OpenAI, `error` describes a line that has no HTTP response: it could not be run, was canceled, or has expired. A
job that its worker failed has a `response`, with the status that an API would return and an error object as its body.
"""

import json
from collections.abc import Mapping
from typing import Any

from stoker.batch.lines import BadLine
from stoker.openai.answers import answer_body
from stoker.openai.failures import of_worker
from stoker_shared.result import GenerationResult


def success(line_id: str, custom_id: str, url: str, created_s: int, result: GenerationResult) -> dict[str, Any]:
    """The line of a job that finished.

    Args:
        line_id: the line's `id`, as `answer_id_for`.
        created_s: when the answer was made, in Unix seconds.
    """
    response = {"status_code": 200, "request_id": result.job_id, "body": answer_body(url, created_s, result)}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": None}


def failure(line_id: str, custom_id: str, job_id: str, reason: str, partial_text: str | None) -> dict[str, Any]:
    """The line of a job that its worker failed.

    Args:
        reason: the worker's one line, ``ErrorName: message``.
        partial_text: the text that a job generated before it timed out, else ``None``.
    """
    failed = of_worker(reason, partial_text)
    response = {"status_code": failed.status, "request_id": job_id, "body": failed.body}
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
