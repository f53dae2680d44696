"""Converts chat messages as SDKs send them into the one form that stoker keeps. Pure; the same for all models.

SDKs write text as a list of parts, and send an API's answers back with their output fields (``refusal``,
``annotations``, ``audio``, ``function_call``, ``parsed``). Content that is not text is refused by name.
"""

from collections.abc import Mapping
from typing import Any, Final

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

    Raises:
        ValueError: a part is not text, or a field would be lost.
    """
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
        # Joined without separators, as mlx-lm's server does, and templates that take a list.
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
