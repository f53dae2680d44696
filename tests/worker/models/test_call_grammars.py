"""A call that has to be made is read back, by mlx-lm's own parser where it has markers, and valid for its tool."""

import json
from typing import Any

import jsonschema
import pytest
from tests.worker.models.test_grammars import allowed, asked, some_answer
from tests.worker.models.tool_formats import ARGUMENTS, CALLS, TOOL, wrapper
from tests.worker.pipeline.answers import answer_to
from tokenizers import AddedToken

from stoker_shared.errors import GuideRefused
from stoker_worker.models.answer_formats import answer_format
from stoker_worker.models.guides import GrammarGuides

pytestmark = pytest.mark.slow

TEXT = {"type": "string", "maxLength": 9}
KINDS: dict[str, Any] = {
    "text": TEXT,
    "word": {"enum": ["red <b>", "blau", "é"]},
    "number": {"type": "number", "minimum": -1e6, "maximum": 1e6},
    "list": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
    "whole or null": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,9}$"},
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "name": TEXT},
    "required": ["name"],
    "additionalProperties": False,
}
MARKED = ("json_tools", "kimi_k2", "kimi_k3", "longcat", "mistral")
"""Parsers that read a JSON object between their markers."""

PARSERS = (*MARKED, "qwen3_coder", "pythonic", None)
"""With one for tags, another one, and a model without any."""

OTHER_FORMS = {"mistral", "kimi_k3", "longcat"}
"""Parsers that read several forms; the grammar has another one than `CALLS`."""


def tool(parameters: Any, name: str = "look") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Model:
    """A model of random weights whose calls have the notation of a parser."""

    def __init__(self, parser: str | None, added: tuple[Any, ...] = ()) -> None:
        self.wrapper = wrapper(parser, added)
        form = answer_format(self.wrapper)
        self.form = form
        self.maker = GrammarGuides(self.wrapper, form)

    def text(self, tools: list[Any], seed: int, **fields: Any) -> str:
        """An answer that is drawn from what the grammar allows."""
        guide = self.maker.guide_for(asked(tools=tools, tool_choice="required", **fields), ())
        return some_answer(guide, self.wrapper, seed)

    def read(self, text: str, tools: list[Any]) -> tuple[Any, bool]:
        """The call, by mlx-lm's parser, and whether it is plain."""
        if text.startswith('{"name": '):
            return json.loads(text), True
        start, end = self.form.tool_start or "", self.form.tool_end or ""
        assert text.startswith(start)
        assert text.endswith(end)
        assert self.form.parse_call is not None
        found = self.form.parse_call(text[len(start) : len(text) - len(end)], tools)
        if isinstance(found, list):
            (found,) = found
        return found, False

    def accepts(self, text: str, tools: list[Any]) -> bool:
        guide = self.maker.guide_for(asked(tools=tools, tool_choice="required"), ())
        assert guide is not None
        token = None
        for following in self.wrapper._tokenizer.encode(text, add_special_tokens=False):
            if following not in allowed(guide.after(token)):
                return False
            token = following
        return bool(self.wrapper.eos_token_ids & {*allowed(guide.after(token))})


@pytest.mark.parametrize("parser", MARKED)
def test_the_call_that_a_parser_reads_is_what_the_grammar_accepts(parser):
    model = Model(parser)
    said = f"{model.form.tool_start}{CALLS[parser]}{model.form.tool_end}"
    tools = [tool({**TOOL["function"]["parameters"], "required": ["city"]}, "weather")]
    given, _ = model.read(said, tools)
    assert given["arguments"] == ARGUMENTS
    assert model.accepts(said, tools) == (parser not in OTHER_FORMS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parser", PARSERS)
def test_whatever_is_drawn_is_read_by_the_parser_and_valid(parser, kind):
    model, n_plain = Model(parser), 0
    key = kind.replace(" ", "_")
    parameters = {"type": "object", "properties": {key: KINDS[kind]}, "required": [key], "$defs": {"point": POINT}}
    tools = [tool({**parameters, "additionalProperties": False})]
    for seed in range(5):
        text = model.text(tools, seed)
        call, is_plain = model.read(text, tools)
        assert call["name"] == "look"
        jsonschema.validate(call["arguments"], tools[0]["function"]["parameters"])
        n_plain += is_plain
    assert n_plain == (0 if parser in MARKED else 5)


def closed(properties: Any, *required: str) -> dict[str, Any]:
    """Of an object with these properties only: a drawn number of another one may be too large for JSON."""
    return {"properties": properties, "required": [*required], "additionalProperties": False}


SEVERAL = [
    tool(closed({key: KINDS[key] for key in ("text", "number", "word")}, "number")),
    tool({"type": "object", **closed({})}, "nothing"),
    tool(closed({"text": TEXT, "number": KINDS["number"]}), "optional"),
    tool(closed({"a key": TEXT, "b": TEXT}, "a key"), 'odd "name"'),
]
THINK = ("<think>", "</think>")
SPECIAL = {
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]",),
}
"""Tokens inside a call that no text can write."""


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("parser", PARSERS)
def test_one_of_several_tools_is_called_after_the_thinking_whatever_tokens_the_notation_has(parser, is_special):
    markers = [answer_format(wrapper(parser)).tool_start, answer_format(wrapper(parser)).tool_end] if parser else []
    special = [AddedToken(text, special=True) for text in (*SPECIAL.get(parser or "", ()), *filter(None, markers))]
    model = Model(parser, (*THINK, *(special if is_special else ())))
    names, thoughts, tools = set(), 0, SEVERAL
    for seed in range(40):
        text = model.text(tools, seed, max_reasoning_tokens=3)
        answer = answer_to(text, model.form, tools=tools, tool_choice="required").choice
        (call,) = answer.tool_calls or []
        assert (answer.content, answer.finish_reason, answer.tool_error) == ("", "tool_calls", None)
        called = {one["function"]["name"]: one["function"].get("parameters", {}) for one in tools}
        jsonschema.validate(json.loads(call.function.arguments), called[call.function.name])
        names.add(call.function.name)
        thoughts += answer.reasoning is not None
    assert names == {one["function"]["name"] for one in tools}
    assert thoughts > 0


LINKED = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 9} for n in range(40)} | {"d40": {"enum": ["x"]}}
NESTED = {
    f"d{n}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "abcdef"}}
    for n in range(40)
} | {"d40": {"enum": ["x"]}}
"""Short, and of 9^40 and 6^40 forms."""

OWN = {"type": "object", "properties": {"x": {"$ref": "#/$defs/own"}, "y": {"$ref": "#/$defs/own"}}}
ODD: list[Any] = [
    {"$ref": "#/$defs/own"},
    {"$ref": "#/$defs/d0"},
    {"properties": [3]},
    {"type": 3},
    {"enum": []},
    [],
    None,
]


@pytest.mark.parametrize("linked", [LINKED, NESTED])
def test_a_schema_that_is_none_or_refers_to_itself_is_refused_or_written(linked):
    model, n_refused = Model("json_tools"), 0
    for odd in ODD:
        parameters = {"properties": {"a": odd, "b": TEXT}, "$defs": {"own": OWN, **linked}}
        try:
            guide = model.maker.guide_for(asked(tools=[tool(parameters)], tool_choice="required"), ())
        except GuideRefused:
            n_refused += 1
        else:
            assert guide is not None
            assert guide.after(None) is not None
    assert n_refused > 2
