"""A chat message, and its conversion from the forms that SDKs send into the one that stoker keeps. Pure; both sides use
it.

SDKs write text as a list of parts, and send an API's answers back with their output fields (``refusal``,
``annotations``, ``audio``, ``function_call``, ``parsed``). Content that is not text is refused by name.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_REPEATS_THE_TEXT: Final = ("annotations", "parsed")
"""Fields that only annotate or parse the answer's text, which the message has anyway."""

_THINKING: Final = ("reasoning_content", "reasoning")
"""Servers and SDKs use either name."""

_MUST_BE_EMPTY: Final = {
    "audio": "this worker takes text only",
    "function_call": "give 'tool_calls' instead",
}


_MOST_PARTS: Final = 10_000


def plain_message(fields: Any) -> Any:
    """The fields of a message, with its text in one string and without fields that repeat it; other values unchanged.
    Raises `ValueError`: a part is not text, or a field would be lost."""
    if not isinstance(fields, Mapping):
        return fields
    message = {name: value for name, value in fields.items() if name not in _REPEATS_THE_TEXT}
    for name, instead in _MUST_BE_EMPTY.items():
        if message.pop(name, None):
            raise ValueError(f"'{name}' is not served: {instead}")
    thinking = [message.pop(name, None) for name in _THINKING]
    if any(thinking):
        message["reasoning_content"] = thinking[0] or thinking[1]
    if message.get("tool_calls") in ([], ()):  # some templates take even an empty list for a call
        del message["tool_calls"]
    content = message.get("content")
    if isinstance(content, list | tuple):
        if len(content) > _MOST_PARTS:
            raise ValueError(f"'content' has {len(content)} parts, the limit is {_MOST_PARTS}")
        # Joined without separators, as in mlx-lm's server and in templates that take a list.
        content = message["content"] = "".join(_text_of(part) for part in content)
    refusal = message.pop("refusal", None)
    if refusal:
        if content or not isinstance(refusal, str):
            raise ValueError("'refusal' must be text, and not beside 'content'")
        message["content"] = refusal  # the assistant's answer
    return message


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind in ("text", "refusal"):
            if isinstance(text := part.get(kind), str):
                return text
            raise ValueError(f"a part of type '{kind}' must have '{kind}', a string")
        if isinstance(kind, str):
            raise ValueError(f"a part of type {kind[:64]!r} is not served: this worker takes text only")
    raise ValueError("parts of 'content' must be objects with a 'type'")


MOST_TOOL_CALLS: Final = 1_000


def as_tuple(value: object) -> object:
    """JSON has only lists, and OpenAI's `stop` may be a single string."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class Message(BaseModel):
    """One chat message; validation accepts the forms that SDKs send.

    Attributes:
        content: ``None`` only if there are `tool_calls`.
        reasoning_content: the thinking before an assistant's answer, for templates that keep it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: (
        Annotated[
            tuple[dict[str, Any], ...], Field(max_length=MOST_TOOL_CALLS, fail_fast=True), BeforeValidator(as_tuple)
        ]
        | None
    ) = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_kept(cls, fields: Any) -> Any:
        return plain_message(fields)

    @model_validator(mode="after")
    def _has_content_or_calls(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("'content' must be given, unless the message has 'tool_calls'")
        return self

    def is_exactly(self, other: "Message") -> bool:
        """True if both have the same JSON; ``==`` equates 1, 1.0 and True in tool calls, but chat templates do not."""
        if self is other:
            return True
        ours, theirs = ((x.role, x.content, x.reasoning_content, x.name, x.tool_call_id) for x in (self, other))
        return ours == theirs and json.dumps(self.tool_calls) == json.dumps(other.tool_calls)

    def as_template_input(self) -> dict[str, Any]:
        """A plain dict, without the fields that were not set."""
        return self.model_dump(exclude_none=True, mode="json")
