"""A chat message of a request. Pure; both sides use it."""

import json
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from stoker_shared.sdk_message import plain_message

_MOST_TOOL_CALLS: Final = 1_000


def as_tuple(value: object) -> object:
    """JSON has only lists, and OpenAI's `stop` may be a single string."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class Message(BaseModel):
    """One chat message; `sdk_message` brings the forms that SDKs send into this one.

    Attributes:
        content: ``None`` only beside `tool_calls`.
        reasoning_content: the thinking before an assistant's answer, for templates that keep it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: (
        Annotated[
            tuple[dict[str, Any], ...], Field(max_length=_MOST_TOOL_CALLS, fail_fast=True), BeforeValidator(as_tuple)
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
        """Whether both have the same JSON; ``==`` equates 1, 1.0 and True in tool calls, but chat templates do not."""
        if self is other:
            return True
        ours, theirs = ((x.role, x.content, x.reasoning_content, x.name, x.tool_call_id) for x in (self, other))
        return ours == theirs and json.dumps(self.tool_calls) == json.dumps(other.tool_calls)

    def as_template_input(self) -> dict[str, Any]:
        """The message as a plain dict without the fields that were not set."""
        return self.model_dump(exclude_none=True, mode="json")
