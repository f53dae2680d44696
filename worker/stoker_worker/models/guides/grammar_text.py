"""From a request to the grammar of its answer, as text for llguidance. Pure.

llguidance compiles the text, and refuses what it does not support.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher

from stoker_shared.errors import GuideRefused
from stoker_shared.request import GenerationRequest, Guide, NamedTool

_JSON: Final[dict[str, Any]] = {"whitespace_pattern": r"[ \n]{1,20}", "lenient": False}
"""White space has a limit, because a model that is not sure may repeat it until its tokens are used up. `lenient` would
drop the parts of a schema that are not supported."""

CallMarkers = tuple[str, str]
"""What a tool call begins and ends with, each as an item of a Lark rule."""


def grammar_text(request: GenerationRequest, markers: CallMarkers | None) -> str | None:
    """
    Args:
        markers: those of a model that writes its calls as JSON, else ``None``.

    Returns:
        ``None`` for an answer of any form.

    Raises:
        GuideRefused: no grammar can be written.
    """
    if request.guide is not None:
        return _of_guide(request.guide)
    if request.is_formed and request.response_format is not None:
        wanted = request.response_format.json_schema
        schema = {"type": "object"} if wanted is None else wanted.schema_
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON))  # type: ignore[arg-type]
    if request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool):
        return _of_call(request.tool_choice, request.tools or (), markers)
    return None


def _of_guide(guide: Guide) -> str:
    if guide.regex is not None:
        return str(LLMatcher.grammar_from_regex(guide.regex))
    if guide.lark is not None:
        return str(LLMatcher.grammar_from_lark(guide.lark))
    choices = " | ".join(_literal(choice) for choice in guide.choice or ())
    return str(LLMatcher.grammar_from_lark(f"start: {choices}"))


def _of_call(choice: NamedTool | str, tools: Sequence[Mapping[str, Any]], markers: CallMarkers | None) -> str:
    """One call of one of the tools, and nothing else.

    Each tool's parameters are a schema of their own, so that references inside it keep their meaning.
    """
    if markers is None:
        raise GuideRefused("this model has no JSON form of tool calls: 'tool_choice' must be 'auto' or 'none'")
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [found for tool in tools if (found := _function(tool))["name"] == wanted or wanted is None]
    if not functions:
        raise GuideRefused(f"'tool_choice' names {wanted!r}, which is not in 'tools'")
    before, after = markers
    names = [f"call_{index}" for index in range(len(functions))]
    rules = [f"start: {before} LINE ({' | '.join(names)}) LINE {after}", r"LINE: /\n?/"]
    for name, function in zip(names, functions, strict=True):
        opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        schema = {**(function.get("parameters") or {}), "type": "object", "x-guidance": _JSON}
        rules.append(f'{name}: {_literal(opening)} {name}_arguments "}}"\n{name}_arguments: %json {json.dumps(schema)}')
    return str(LLMatcher.grammar_from_lark("\n".join(rules)))


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


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
