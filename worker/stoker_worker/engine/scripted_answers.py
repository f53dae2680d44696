"""The form of the scripted engine's answers: thinking between ``<think>`` and ``</think>``, calls as JSON between
``<tool_call>`` and ``</tool_call>``. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stoker_shared.answer_parts import Edge
from stoker_worker.ports import AnswerFormat

_THINK: Final = "<think>", "</think>"
_CALL: Final = "<tool_call>", "</tool_call>"


def _parse_call(text: str, _tools: Sequence[Mapping[str, Any]] | None) -> Any:
    return json.loads(text)


SCRIPTED_ANSWERS: Final = AnswerFormat(
    think_start=_THINK[0],
    think_end=_THINK[1],
    think_start_ids=tuple(_THINK[0].encode()),
    think_end_ids=tuple(_THINK[1].encode()),
    tool_start=_CALL[0],
    tool_end=_CALL[1],
    tool_start_ids=tuple(_CALL[0].encode()),
    tool_parser="json_tools",
    parse_call=_parse_call,
    is_json_call=True,
    edges=(
        Edge("normal", _THINK[0], "reasoning"),
        Edge("reasoning", _THINK[1], "normal"),
        Edge("normal", _CALL[0], "tool"),
        Edge("reasoning", _CALL[0], "tool"),
        Edge("tool", _CALL[1], "normal"),
    ),
)


def said_by(model: str, line: str) -> str | None:
    """The text that the last line of a prompt asks the model of this name for; ``None`` if it asks for none."""
    if line.startswith("if ") and " say " in line:
        name, _, texts = line.removeprefix("if ").partition(" say ")
        text, _, other = texts.partition(" else ")
        return text if name == model else other
    return line.removeprefix("say ") if line.startswith("say ") else None
