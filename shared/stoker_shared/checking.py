"""Whether an answer passes its job's check. Pure; the worker's loader and finisher threads, and producers."""

from typing import Final

from stoker_shared import answer_schema
from stoker_shared.check import Check
from stoker_shared.pattern import is_found
from stoker_shared.result import Choice

_MOST_CHARACTERS: Final = 200


def rejection(check: Check, answer: Choice) -> str | None:
    """Why the check rejects the answer, in one line that begins with the condition; ``None``: it is accepted."""
    reason = _first_fault(check, answer)
    # The answer's JSON may name half of a character, which no text can hold.
    return None if reason is None else reason[:_MOST_CHARACTERS].encode(errors="replace").decode()


def make_ready(check: Check) -> None:
    """
    Raises:
        InvalidRequest: its schema cannot be used.
    """
    if check.json_schema is not None:
        answer_schema.make_ready(check.json_schema)


def _first_fault(check: Check, answer: Choice) -> str | None:
    text = answer.content
    if check.finish_reason and answer.finish_reason not in check.finish_reason:
        return f"finish_reason: {answer.finish_reason}"
    if (missing := next((part for part in check.contains if part not in text), None)) is not None:
        return f"contains: {missing!r} is missing"
    if (found := next((part for part in check.forbids if part in text), None)) is not None:
        return f"forbids: {found!r} is there"
    if check.regex is not None and not is_found(check.regex, text):
        return "regex: not found"
    if check.min_mean_logprob is not None:
        tokens = answer.logprobs.content if answer.logprobs is not None else []
        mean = sum(token.logprob for token in tokens) / len(tokens) if tokens else float("-inf")
        if mean < check.min_mean_logprob:
            return f"min_mean_logprob: {mean:.3f}"
    fault = answer_schema.schema_fault(check.json_schema, text) if check.json_schema is not None else None
    return None if fault is None else f"json_schema: {fault}"
