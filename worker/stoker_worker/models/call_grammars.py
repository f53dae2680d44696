"""Grammars of a call that has to be made: its name, and its arguments as a JSON object. Pure; no MLX, no mlx-lm.

If mlx-lm's parser for the model reads JSON objects between the model's markers, the call has these markers. Otherwise
it is plain: ``{"name": ..., "arguments": {...}}``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_shared.errors import GuideRefused
from stoker_shared.request import NamedTool, ToolChoice

JSON_OPTIONS: Final[dict[str, Any]] = {"whitespace_pattern": r"[ \n]{1,20}", "lenient": False}
"""White space has a limit, because an uncertain model may repeat it until its tokens are used up. `lenient` would drop
the unsupported parts of a schema."""


@dataclass(frozen=True)
class CallTokens:
    """How a model's tokenizer writes calls.

    Attributes:
        parser: the name of mlx-lm's parser; ``None``: calls are plain.
        start, end: the markers around a call.
        added: the ids of the tokens that were added to the vocabulary.
        special: those of them that no text can write.
    """

    parser: str | None
    start: str
    end: str
    added: Mapping[str, int]
    special: Mapping[str, int]

    def items(self, text: str, *, is_marker: bool = False) -> str:
        """Lark items of a text, whose line breaks may be left out. In a marker, added tokens that are not special are
        also given by id, because the model has learned these tokens and not their letters."""
        ids = self.added if is_marker else self.special
        pattern = "|".join(map(re.escape, sorted([*ids, "\n"], key=len, reverse=True)))
        parts = filter(None, re.split(f"({pattern})", text))
        known = {"\n": "LINE", **{token: f"<[{token_id}]>" for token, token_id in ids.items()}}
        return " ".join(known.get(part) or literal(part) for part in parts)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class _Notation:
    """The text around a call's arguments.

    Attributes:
        before: texts, and names of terminals in capitals. ``{name}`` becomes the tool's name, ``{quoted}`` its JSON.
        needs: a token without which mlx-lm's parser does not read this notation.
        names: a pattern of the tool names that it can write.
    """

    before: tuple[str, ...]
    after: str
    needs: str = ""
    names: str = "(?s:.*)"

    def can_write(self, name: str, tokens: CallTokens) -> bool:
        is_known = not self.needs or self.needs in tokens.added
        return is_known and re.fullmatch(self.names, name, re.ASCII) is not None


_PLAIN: Final = _Notation(('{"name": {quoted}, "arguments": ',), "}")
_JSON: Final = _Notation(('\n{"name": {quoted}, "arguments": ',), "}\n")

_NOTATIONS: Final[Mapping[str, tuple[_Notation, ...]]] = {
    "json_tools": (_JSON,),
    "longcat": (_JSON,),
    "mistral": (
        _Notation(("{name}[ARGS]",), "", needs="[ARGS]", names=r"[\w-]+"),
        _Notation(('[{"name": {quoted}, "arguments": ',), "}]"),
    ),
    "kimi_k2": (
        _Notation(
            ("<|tool_call_begin|>functions.{name}:", "INDEX", "<|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
            names=r"[\w.-]+",
        ),
    ),
    "kimi_k3": (
        _Notation(
            ('<|open|>call tool="{name}" index="1"<|sep|><|open|>json type="object"<|sep|>',),
            "<|close|>json<|sep|><|close|>call<|sep|>",
            names=r"[\w.-]+",
        ),
    ),
}
"""By the name of mlx-lm's parser. The first notation that can write a tool is taken, and a plain call if none can."""


def call_grammar(choice: ToolChoice, tools: Sequence[Mapping[str, Any]], tokens: CallTokens) -> str:
    """One call of one of the tools, or of the tool that `choice` names, and nothing else, in Lark.

    Each tool's parameters are a schema of their own, so that references inside it keep their meaning.

    Raises:
        GuideRefused: a tool is not a valid one, or the named one is not among them.
    """
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [found for tool in tools if (found := _function(tool))["name"] == wanted or wanted is None]
    if not functions:
        raise GuideRefused(f"'tool_choice' names {wanted!r}, which is not in 'tools'")
    rules = [f"start: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    rules += [r"LINE: /\n?/", "INDEX: /[0-9]{1,4}/"]
    for index, function in enumerate(functions):
        schema = {**(function.get("parameters") or {}), "type": "object", "x-guidance": JSON_OPTIONS}
        rules.append(f"call_{index}: {_call(function['name'], f'arguments_{index}', tokens)}")
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def _call(name: str, arguments: str, tokens: CallTokens) -> str:
    fitting = (one for one in _NOTATIONS.get(tokens.parser or "", ()) if one.can_write(name, tokens))
    notation = next(fitting, _PLAIN)

    def items(template: str) -> str:
        return tokens.items(template.replace("{name}", name).replace("{quoted}", literal(name)))

    before = " ".join(part if part.isupper() else items(part) for part in notation.before)
    call = f"{before} {arguments} {items(notation.after)}"
    if notation is _PLAIN:
        return call
    start, end = (tokens.items(marker, is_marker=True) for marker in (tokens.start, tokens.end))
    return f"{start} {call} {end}"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GuideRefused("a tool that must be called needs a 'function' with a 'name'")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise GuideRefused(f"the 'parameters' of tool {function['name']!r} are no JSON schema")
    kinds = parameters.get("type", "object")  # many leave it out
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise GuideRefused(f"the 'parameters' of tool {function['name']!r} are not those of an object")
    return function
