"""The forms in which a chat template takes SDKs' messages: developer roles, thinking, tool calls, no content.

Templates disagree, and a form that suits one is silently rendered wrong by another: the call is missing, its arguments
are quoted twice, or ``None`` is written. So a call is tried in each form, and the first that is rendered whole is used.
Imports neither MLX nor transformers. Not thread-safe: each tokenizer has its own.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

_NAMES_DEVELOPER: Final = re.compile(r"""(['"])developer\1""")
_THINKING: Final = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with the thinking before an answer, the most specific first."""

_TRIED: Final = ("stoker_try", "stoker_name", "stoker_value")
_MISQUOTED: Final = (r"\"stoker_name", "'stoker_name")
"""Arguments that were text already and are JSON-encoded once more; an object in Python's notation."""

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "stoker_tool",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"stoker_field": {"type": "string", "description": ""}},
            "required": [],
        },
    },
}
"""Shares no word with the call that is tried, so that words of the call cannot come from the list of tools."""

Apply = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages, perhaps with tools, through the template; raises any exception of the template."""


@dataclass(frozen=True)
class _CallForm:
    """One way to write a message with tool calls.

    Attributes:
        no_content: the fields of a message that has no content.
        parsed: whether a call's arguments are an object; else they are JSON text.
    """

    no_content: Mapping[str, Any]
    parsed: bool

    def of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = [self._call(call) for call in message["tool_calls"]]
        return {**({} if "content" in message else self.no_content), **message, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        arguments = _parsed(arguments) if self.parsed else _as_text(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


_FORMS: Final = tuple(
    _CallForm(no_content, parsed) for parsed in (True, False) for no_content in ({"content": ""}, {"content": None}, {})
)


class TemplateForms:
    def __init__(self, apply: Apply, template: str) -> None:
        """
        Args:
            template: the text of the chat template; of all of them if the model has several.
        """
        self._apply = apply
        self._developer = "developer" if _NAMES_DEVELOPER.search(template) else "system"
        self._thinking = next((name for name in _THINKING if re.search(rf"\b{name}\b", template)), _THINKING[0])
        self._form_of = cache(self._find_form)

    def fit(self, message: Mapping[str, Any], *, with_tools: bool) -> Mapping[str, Any]:
        """The message in the form that this template renders correctly."""
        if message.get("role") == "developer":
            message = {**message, "role": self._developer}
        if "reasoning_content" in message:
            message = {self._thinking if name == "reasoning_content" else name: x for name, x in message.items()}
        return self._form_of(with_tools).of(message) if message.get("tool_calls") else message

    def _find_form(self, with_tools: bool) -> _CallForm:
        """The first form in which a call is rendered whole; if there is none, the form of mlx-lm's own server."""
        return next((form for form in _FORMS if self._is_whole(form, with_tools)), _FORMS[0])

    def _is_whole(self, form: _CallForm, with_tools: bool) -> bool:
        silent = self._tried(form, with_tools)
        if not all(word in silent for word in _TRIED) or any(bad in silent for bad in _MISQUOTED):
            return False
        return silent.count("None") <= self._tried(form, with_tools, content="!").count("None")

    def _tried(self, form: _CallForm, with_tools: bool, **content: str) -> str:
        """A call in this form, rendered; empty when the template refuses it."""
        name, key, value = _TRIED
        call = {"name": name, "arguments": {key: value}}
        call_id = "stoker000"  # Mistral's templates want nine letters or digits
        calling = {"role": "assistant", "tool_calls": [{"type": "function", "id": call_id, "function": call}]}
        messages = [
            {"role": "user", "content": "?"},
            form.of({**calling, **content}),
            {"role": "tool", "content": "!", "name": name, "tool_call_id": call_id},
        ]
        try:
            return self._apply(messages, [_TOOL] if with_tools else None)
        except Exception:  # a template is a program and may raise anything
            return ""


def _parsed(arguments: Any) -> Any:
    """The object in a JSON text; anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
