"""The calls of one answer, as mlx-lm's parsers read them. Pure; finisher threads.

A parser is another library's, and the model may write anything: what does not become a call has a reason instead.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from stoker_shared.result import CalledFunction, ToolCall
from stoker_shared.text import one_line
from stoker_worker.ports.answer_format import AnswerFormat

_ID_LETTERS: Final = 9
"""Templates of Mistral's want nine letters or digits."""

_MOST_ID_LETTERS: Final = 64

_MOST_LEVELS: Final = 100
"""Objects and lists in each other, in a call's arguments. At some 400, no template writes the conversation any more."""


class Calls:
    """
    Attributes:
        found: in the order of the answer.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        form: AnswerFormat,
        used_ids: Collection[str],
        seed: str,
        *,
        is_cut_off: bool,
    ) -> None:
        """
        Args:
            used_ids: of the calls earlier in the conversation.
            seed: ids are made from it.
            is_cut_off: whether `max_tokens` ended the answer.
        """
        self._tools = _as_parsers_take(tools)
        self._names = {tool["function"]["name"] for tool in self._tools}
        self._parse = form.parse_call
        self._ids = set(used_ids)
        self._seed = seed
        self._is_cut_off = is_cut_off
        self.found: list[ToolCall] = []

    def take(self, text: str, is_closed: bool) -> str | None:
        """Read the text between a call's markers; returns why it is no call. `is_closed`: it has the last marker."""
        if not is_closed and self._is_cut_off:
            return "the call is cut off by max_tokens"
        assert self._parse is not None
        try:
            parsed = self._parse(text, self._tools)
            read = [_read(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception as error:  # a parser of another library, on whatever the model wrote
            return one_line(error)
        if not read:
            return "there is no call between the markers"
        if not is_closed and any(name not in self._names for name, _, _ in read):
            return "the call has no end, and names none of the tools"
        for name, arguments, own_id in read:
            function = CalledFunction(name=name, arguments=arguments)
            self.found.append(ToolCall(id=self._id(own_id), function=function))
        return None

    def _id(self, own: str | None) -> str:
        """The model's own id if it is new, else one that the same delivery gets again."""
        count = len(self._ids)
        while own is None or own in self._ids:
            own = hashlib.sha256(f"{self._seed} {count}".encode()).hexdigest()[:_ID_LETTERS]
            count += 1
        self._ids.add(own)
        return own


def _as_parsers_take(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the one form that every parser reads: some raise for a tool without parameters, for a schema that is
    ``true``, or for a tool that is no function."""
    taken = []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
            continue
        given = function.get("parameters")
        parameters = given if isinstance(given, Mapping) else {}
        declared = parameters.get("properties")
        properties = declared.items() if isinstance(declared, Mapping) else ()
        schemas = {key: schema for key, schema in properties if isinstance(schema, Mapping)}
        taken.append(
            {"type": "function", "function": {"name": name, "parameters": {**parameters, "properties": schemas}}}
        )
    return taken


def _read(call: Any) -> tuple[str, str, str | None]:
    """Name, arguments as the JSON text of an object, and the id that the model gave.

    Raises:
        ValueError: it is no call.
        TypeError: an argument is not JSON.
    """
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError("a call is an object with 'name' and 'arguments'")
    name.encode()  # a lone surrogate raises ValueError
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    if _is_deeper(arguments, _MOST_LEVELS):
        raise ValueError(f"the arguments of the call are nested more than {_MOST_LEVELS} levels deep")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= letter <= "\udfff" for letter in written):
        written = json.dumps(arguments, allow_nan=False)
    return name, written, own_id if _is_id(own_id := call.get("id")) else None


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(item, levels - 1) for item in inner)


def _is_id(own: Any) -> bool:
    return isinstance(own, str) and 0 < len(own) <= _MOST_ID_LETTERS and own.isprintable()
