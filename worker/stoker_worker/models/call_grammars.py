"""Grammars of a call that has to be made, in the notation of each of mlx-lm's tool parsers. Pure; no MLX, no mlx-lm.

A parser reads the arguments as one JSON object, or one by one: as text, as JSON values, or as values in its own
notation. A tool whose parameters its notation cannot write so that they are read back as the same values, and every
tool of a model without a notation, is written as a plain call: the JSON object ``{"name": ..., "arguments": {...}}``
without markers.
"""

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from stoker_shared.errors import GuideRefused
from stoker_shared.request import NamedTool, ToolChoice

JSON_OPTIONS: Final[dict[str, Any]] = {"whitespace_pattern": r"[ \n]{1,20}", "lenient": False}
"""White space has a limit, because a model that is not sure may repeat it until its tokens are used up. `lenient` would
drop the parts of a schema that are not supported."""

Schema = Mapping[str, Any]

_ANNOTATIONS: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_OF_PARAMETERS: Final = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_MOST_COUNTED: Final = 100
"""Most characters of a text that are counted: with each one, a lexer that also looks for the marker grows. llguidance
counts those of a JSON string with less."""

_MOST_VALUES: Final = 2_000
"""Of one tool, with those inside objects."""

_MOST_LEVELS: Final = 8
"""Of references and alternatives inside one another that are followed."""


@dataclass(frozen=True)
class CallTokens:
    """How a model's tokenizer writes calls.

    Attributes:
        parser: the name of mlx-lm's parser; ``None``: calls are plain.
        start, end: the markers around a call.
        added: the ids of the tokens that were added to the vocabulary.
        special: those of them that no text can write.
        has_headers: whether a header is before each message, as `muse_spark` of mlx-lm's chat templates tells.
    """

    parser: str | None
    start: str
    end: str
    added: Mapping[str, int]
    special: Mapping[str, int]
    has_headers: bool = False

    def items(self, text: str, *, is_marker: bool = False) -> str:
        """Lark items of a text; a line break in it may be left out.

        Args:
            is_marker: also tokens that are not special are given by id: the model has learned these tokens, not their
                letters.
        """
        ids = self.added if is_marker else self.special
        pattern = "|".join(map(re.escape, sorted([*ids, "\n"], key=len, reverse=True)))
        parts = filter(None, re.split(f"({pattern})", text))
        return " ".join(f"<[{ids[part]}]>" if part in ids else _item(part) for part in parts)


def _item(part: str) -> str:
    return "LINE" if part == "\n" else literal(part)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class _Text:
    """The strings that a schema allows.

    Attributes:
        least, most: characters.
        choices: if it lists them.
        or_null: whether it allows ``null`` as well.
    """

    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] | None = None
    or_null: bool = False


@dataclass(frozen=True)
class _Parameters:
    """A tool's parameters, for a notation that writes them one by one.

    Attributes:
        definitions: what their schemas refer to.
    """

    properties: Mapping[str, Schema]
    required: frozenset[str]
    definitions: Mapping[str, Any]
    _kinds: dict[int, frozenset[str] | None] = field(default_factory=dict, init=False, repr=False)

    def resolved(self, schema: Schema) -> Schema | None:
        """What the schema refers to, or itself; ``None`` if that is unknown."""
        for _ in range(_MOST_LEVELS):
            if "$ref" not in schema:
                return schema
            keys = str(schema["$ref"]).split("/")
            if len(keys) != 3 or keys[0] != "#" or not isinstance(own := self.definitions.get(keys[1]), Mapping):
                return None
            if not isinstance(found := own.get(keys[2]), Mapping):
                return None
            schema = found
        return None

    def json(self, schema: Schema, **options: Any) -> str:
        """Lark of the JSON of a value."""
        definitions = self.definitions if '"$ref"' in json.dumps(schema) else {}
        return f"%json {json.dumps({**schema, **definitions, 'x-guidance': {**JSON_OPTIONS, **options}})}"

    def kinds(self, schema: Schema) -> frozenset[str] | None:
        """JSON's names of the types that its values have; ``None``: any, or unknown."""
        found = self.resolved(schema)
        if found is None:
            return None
        if id(found) not in self._kinds:
            self._kinds[id(found)] = None  # a schema inside itself
            self._kinds[id(found)] = self._kinds_of(found)
        return self._kinds[id(found)]

    def _kinds_of(self, schema: Schema) -> frozenset[str] | None:
        if "type" in schema:
            return frozenset(schema["type"] if isinstance(schema["type"], list) else [schema["type"]])
        if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
            return frozenset(map(_kind, values))
        if not isinstance(parts := schema.get("anyOf", schema.get("oneOf")), list) or not parts:
            return None
        each = [self.kinds(part) if isinstance(part, Mapping) else None for part in parts]
        return frozenset().union(*filter(None, each)) if None not in each else None

    def text(self, schema: Schema, levels: int = _MOST_LEVELS) -> _Text | None:
        """``None`` if it allows other values than strings and ``null``, or limits strings in another way."""
        found = self.resolved(schema)
        if found is None or not levels:
            return None
        rules = {key: value for key, value in found.items() if key not in _ANNOTATIONS}
        if not rules:
            return _Text()
        if rules.keys() in ({"anyOf"}, {"oneOf"}) and isinstance(parts := next(iter(rules.values())), list):
            others = [part for part in parts if part != {"type": "null"}]
            inner = self.text(others[0], levels - 1) if len(others) == 1 and isinstance(others[0], Mapping) else None
            return inner and replace(inner, or_null=inner.or_null or len(parts) > 1)
        kinds = self._kinds_of(rules)
        if kinds is None or "string" not in kinds or not kinds <= {"string", "null"}:
            return None
        if not rules.keys() <= {"type", "enum", "const", "minLength", "maxLength"}:
            return None
        values = [rules["const"]] if "const" in rules else rules.get("enum")
        choices = None if values is None else tuple(value for value in values if isinstance(value, str))
        least, most = rules.get("minLength", 0), rules.get("maxLength")
        return _Text(least, most, choices, "null" in kinds and (values is None or None in values))


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _parameters(schema: Schema) -> _Parameters | None:
    """``None`` unless they are properties that do not depend on one another."""
    given = schema.get("properties", {})
    if not schema.keys() <= _ANNOTATIONS | _OF_PARAMETERS or not isinstance(given, Mapping):
        return None
    properties = {key: {} if value is True else value for key, value in given.items()}
    required = schema.get("required", [])
    if not all(isinstance(value, Mapping) for value in properties.values()) or not isinstance(required, list):
        return None
    if not properties.keys() >= {*required}:
        return None
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return _Parameters(properties, frozenset(required), definitions)


class _Writer:
    """Writes the call of one tool.

    Attributes:
        rules: what its expressions name.
    """

    def __init__(self, tokens: CallTokens, prefix: str, name: str, schema: Schema) -> None:
        """
        Args:
            prefix: the names of its rules begin with it.
            schema: the tool's parameters.
        """
        self.tokens = tokens
        self.name = name
        self.rules: list[str] = []
        self._values_left = _MOST_VALUES
        self._schema = schema
        self._prefix = prefix

    @property
    def parameters(self) -> _Parameters | None:
        return _parameters(self._schema)

    def rule(self, body: str) -> str:
        return self._named(f"{self._prefix}_{len(self.rules)}", body)

    def _terminal(self, body: str) -> str:
        return self._named(f"{self._prefix}_{len(self.rules)}".upper(), body)

    def count_value(self) -> None:
        """
        Raises:
            ValueError: there are too many, as of objects that refer to one another.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise ValueError("too many values")

    def _named(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def named(self, template: str, key: str = "") -> str:
        """Lark items of a template, with the tool's name and an argument's."""
        for place, word in (("{key}", key), ("{name}", self.name), ("{quoted}", literal(self.name))):
            template = template.replace(place, word)
        return self.tokens.items(template)

    def object(self) -> str:
        """All arguments as one JSON object."""
        return self.rule(f"%json {json.dumps({**self._schema, 'type': 'object', 'x-guidance': JSON_OPTIONS})}")

    def text(
        self, text: _Text, end: str, *, without: Sequence[str], never: str = "", stripped: bool = True
    ) -> str | None:
        """Lark of a text, with the marker after it.

        Args:
            without: what must not be in the text, beside the marker.
            never: a regular expression of whole texts that are read as other values, in small or large letters.
            stripped: whether the parser drops white space around the text, and a line break may be there.
        """
        line, end_items = ("LINE", self.tokens.items(end)) if stripped else ("", self.tokens.items(end))
        excluded = f".*(?:{'|'.join(_escaped(part) for part in (end, *without) if part)}).*"
        edge = r"[^\s\x00-\x1f]"
        if text.choices is not None:
            most = float("inf") if text.most is None else text.most
            choices = [one for one in text.choices if text.least <= len(one) <= most]
            wrong = f"(?s:{excluded})" + (f"|(?i:{never})" if never else "")
            if not choices or any(re.fullmatch(wrong, one) or one != one.strip() for one in choices):
                return None
            return f"({' | '.join(map(literal, choices))}) {line} {end_items}"
        if max(text.least, text.most or 0) > _MOST_COUNTED:
            return None
        size = f"{{{text.least},{'' if text.most is None else text.most}}}"
        body = [rf"/[^\x00]{size}/", f"~/(?s:{excluded})/"]
        body += [rf"/({edge}([^\x00]*{edge})?)?/"] if stripped else []
        body += [f"~/(?i:{never})/"] if never else []
        letters = f"({' & '.join(body)})" + (r" /\n?/" if stripped else "")
        # In one piece: a text that is matched by itself would take the beginning of the marker with it.
        if "<[" in end_items:
            return f"{self._terminal(letters)} {end_items}"
        return self._terminal(f"{letters} {literal(end)}")


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


# --- notations that write the arguments one by one ---


class _OneByOne:
    """
    Attributes:
        before, after: what is around the arguments.
        argument: what is before a value.
        separator: what is between arguments.
        names, keys: of the tools and arguments that it can write.
        may_be_empty: whether the parser reads a call without arguments.
    """

    before: str
    argument: str
    after: str
    separator = ""
    names = keys = r"[\w.-]+"
    may_be_empty = True

    def value(self, writer: _Writer, parameters: _Parameters, schema: Schema) -> str | None:
        """Lark of a value, with what ends it; ``None`` if it would not be read back as the same value."""
        raise NotImplementedError

    def call(self, writer: _Writer) -> str | None:
        """``None`` if this notation cannot write the call."""
        parameters = writer.parameters
        if parameters is None or not _matches(self.names, writer.name):
            return None
        if not self.may_be_empty and not parameters.required:
            return None
        return self.pairs(writer, parameters, self.before, self.after)

    def pairs(self, writer: _Writer, parameters: _Parameters, before: str, after: str) -> str | None:
        """The arguments, or the members of an object, in the order of their schemas."""
        tail, head = "", ""
        for key, schema in reversed([*parameters.properties.items()]):
            value = self.value(writer, parameters, schema) if _matches(self.keys, key) else None
            if value is None:
                return None
            pair = writer.rule(f"{writer.named(self.argument, key)} {value}")
            next_one = f"{literal(self.separator)} {pair}" if self.separator else pair
            is_required = key in parameters.required
            head = writer.rule(f"{pair} {tail}" if is_required else f"{pair} {tail} | {head or literal('')}")
            tail = writer.rule(f"{next_one} {tail}" if is_required else f"({next_one})? {tail}")
        return f"{writer.named(before)} {head} {writer.named(after)}"


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name, re.ASCII) is not None


_Way = str | None
"""``text``, ``json``, or ``None`` for a value that would be read as another one."""


@dataclass(frozen=True)
class _Tags(_OneByOne):
    """Values between tags.

    Attributes:
        way: how a value of a schema is written, so that the parser reads it.
        never: see `_Writer.text`.
        reads_json: whether the parser reads a text that is JSON as its value, so that a string may be JSON too.
        has_cdata: whether texts may be in a CDATA section.
    """

    before: str
    argument: str
    end: str
    after: str
    way: Callable[[_Parameters, Schema], _Way]
    never: str = ""
    may_be_empty: bool = True
    reads_json: bool = False
    has_cdata: bool = False

    def value(self, writer: _Writer, parameters: _Parameters, schema: Schema) -> str | None:
        way, text = self.way(parameters, schema), parameters.text(schema)
        end = writer.tokens.items(self.end)
        ways = []
        if way == "text" and text is not None:
            if (written := self._text(writer, text)) is None and not self.reads_json:
                return None
            ways += [written] if written else []
            ways += [f'"null" LINE {end}'] if text.or_null and not self.reads_json else []
        if way == "json" or (way == "text" and self.reads_json):
            ways.append(f"{writer.rule(parameters.json(_bounded(schema)))} LINE {end}")
        return f"({' | '.join(ways)}) LINE" if ways else None

    def _text(self, writer: _Writer, text: _Text) -> str | None:
        written = partial(writer.text, text, never=self.never)
        without = (self.after.strip(), writer.tokens.end)
        if not self.has_cdata:
            return written(self.end, without=without)
        if (text.least, text.most) != (0, None) and text.choices is None:
            return None  # to count in both forms is too much for llguidance's lexer
        plain = written(self.end, without=(*without, "<![CDATA["))
        section = written("]]>" + self.end, without=(*without, "]]>", self.end), stripped=False)
        return plain and section and f'{plain} | "<![CDATA[" {section}'


_MOST_WHOLE: Final = 2**53 - 1


def _bounded(schema: Schema) -> Schema:
    """For parsers that read numbers as floats, which must not overflow."""
    if schema.get("type") not in ("integer", "number") or "enum" in schema or "const" in schema:
        return schema
    least = {} if "exclusiveMinimum" in schema else {"minimum": -_MOST_WHOLE}
    most = {} if "exclusiveMaximum" in schema else {"maximum": _MOST_WHOLE}
    return {**least, **most, **schema}


def _as_declared(parameters: _Parameters, schema: Schema) -> _Way:
    """GLM's: a declared string is text, anything else is read as JSON."""
    return "text" if schema.get("type") == "string" else "json"


def _as_qwen3_coder(parameters: _Parameters, schema: Schema) -> _Way:
    """By a type that is one name. Without one, an object or a list is read as JSON, and everything else as text."""
    declared, kinds = schema.get("type"), parameters.kinds(schema)
    if isinstance(declared, str):
        return "text" if declared == "string" else "json"
    if declared is not None:
        return "json" if kinds is not None and kinds <= {"integer", "number", "null"} else None
    if kinds is not None and kinds <= {"object", "array", "null"}:
        return "json"
    return "text" if kinds is None or kinds <= {"string", "null"} else None


def _as_minimax(parameters: _Parameters, schema: Schema) -> _Way:
    """By the types that a schema names without its references; text if it names none."""
    declared, kinds = _declared(schema), parameters.kinds(schema)
    if kinds is None or "string" in kinds:
        return "text" if declared <= {"string", "null"} else None
    return "json" if kinds <= declared else None


def _declared(schema: Any) -> set[str]:
    """As `minimax_m2._extract_types_from_schema` of mlx-lm."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type", [])
    kinds = {*(given if isinstance(given, list) else [given]), *map(_kind, schema.get("enum", []))}
    for key in ("anyOf", "oneOf", "allOf"):
        kinds.update(*(_declared(part) for part in schema.get(key, [])))
    return kinds or {"string"}


def _as_muse_spark(parameters: _Parameters, schema: Schema) -> _Way:
    """As JSON if it is JSON, else as text."""
    return "text" if parameters.text(schema) is not None else "json"


@dataclass(frozen=True)
class _Gemma(_OneByOne):
    """Gemma's own notation: bare keys, strings between `quote`, other values as in JSON.

    Attributes:
        is_nested: whether the parser reads objects and lists.
        without: what strings must not have.
    """

    quote: str
    is_nested: bool
    without: tuple[str, ...] = ()
    before: str = "call:{name}{"
    argument: str = "{key}:"
    after: str = "}"
    separator: str = ","
    names: str = r"\w+"
    keys: str = r"\w+"

    def value(self, writer: _Writer, parameters: _Parameters, schema: Schema) -> str | None:
        writer.count_value()
        quote = writer.tokens.items(self.quote)
        if (text := parameters.text(schema)) is not None:
            without = (*self.without, writer.tokens.end)
            written = writer.text(text, self.quote, without=without, stripped=False)
            null = ' | "null"' if text.or_null else ""
            return written and f"({quote} {written}{null})"
        found, kinds = parameters.resolved(schema), parameters.kinds(schema)
        if found is None or kinds is None:
            return None
        if kinds <= {"integer", "number", "boolean", "null"}:
            return writer.rule(parameters.json(schema))
        parts = found.get("anyOf", found.get("oneOf"))
        if isinstance(parts, list):
            values = [self.value(writer, parameters, part) for part in parts]
            return None if None in values else f"({' | '.join(value for value in values if value)})"
        return self._nested(writer, parameters, found) if self.is_nested else None

    def _nested(self, writer: _Writer, parameters: _Parameters, schema: Schema) -> str | None:
        if schema.get("type") == "object" and schema.get("properties"):
            inner = _parameters(schema)
            members = inner and replace(inner, definitions=parameters.definitions)
            return self.pairs(writer, members, "{", "}") if members else None
        rules = schema.keys() - _ANNOTATIONS - {"type", "items"}
        items = schema.get("items")
        if schema.get("type") != "array" or rules or not isinstance(items, Mapping):
            return None
        item = self.value(writer, parameters, items)
        return item and f'"[" ({(one := writer.rule(item))} ("," {one})*)? "]"'


class _Python(_OneByOne):
    """Keyword arguments of a Python call; the parser reads JSON's literals too."""

    before, argument, after, separator = "[{name}(", "{key}=", ")]", ", "
    names = keys = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"

    def call(self, writer: _Writer) -> str | None:
        parameters = writer.parameters
        words = {*writer.name.split("."), *(parameters.properties if parameters else ())}
        is_python = not any(keyword.iskeyword(word) or "." in word for word in words)
        return super().call(writer) if is_python else None

    def value(self, writer: _Writer, parameters: _Parameters, schema: Schema) -> str | None:
        return writer.rule(parameters.json(schema, json_allowed_escapes='nrbtf\\"'))


# --- all notations ---


@dataclass(frozen=True)
class _Object:
    """Arguments as one JSON object.

    Attributes:
        before: texts, and names of terminals in capitals.
    """

    before: tuple[str, ...]
    after: str
    names: str = r"[\w.-]+"

    def call(self, writer: _Writer) -> str | None:
        """``None`` if this notation cannot write the call."""
        if "{name}" in "".join(self.before) and not _matches(self.names, writer.name):
            return None
        before = " ".join(part if part.isupper() else writer.named(part) for part in self.before)
        return f"{before} {writer.object()} {writer.named(self.after)}"


_PLAIN: Final = _Object(('{"name": {quoted}, "arguments": ',), "}")
_JSON: Final = _Object(('\n{"name": {quoted}, "arguments": ',), "}\n")
_LIST: Final = _Object(('[{"name": {quoted}, "arguments": ',), "}]")
_HEADER: Final = _Object(("{name}[ARGS]",), "", r"[\w-]+")
_NULLS: Final = "null|none|nil"
_LIKE_JSON: Final = r"[\[{\"].*|-?[0-9][0-9.e+-]*|-?infinity|nan|true|false|null"


def _glm(prefix: str = "", *, may_be_empty: bool = True) -> _Tags:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    argument, end = f"<{key}>{{key}}</{key}>\n<{value}>\n", f"</{value}>"
    return _Tags("{name}\n", argument, end, "", _as_declared, may_be_empty=may_be_empty)


def _invoke(prefix: str, way: Callable[[_Parameters, Schema], _Way], never: str, *, reads_json: bool = False) -> _Tags:
    before, after = f'\n<{prefix}invoke name="{{name}}">\n', f"</{prefix}invoke>\n"
    argument, end = f'<{prefix}parameter name="{{key}}">\n', f"</{prefix}parameter>"
    return _Tags(before, argument, end, after, way, never, reads_json=reads_json)


_Notation = _Object | _OneByOne

_NOTATIONS: Final[Mapping[str, tuple[_Notation, ...]]] = {
    "json_tools": (_JSON,),
    "mistral": (_HEADER, _LIST),
    "kimi_k2": (
        _Object(("<|tool_call_begin|>functions.{name}:", "INDEX", "<|tool_call_argument_begin|>"), "<|tool_call_end|>"),
    ),
    "kimi_k3": (
        _Object(
            ('<|open|>call tool="{name}" index="1"<|sep|><|open|>json type="object"<|sep|>',),
            "<|close|>json<|sep|><|close|>call<|sep|>",
        ),
    ),
    "glm47": (_glm(),),
    "laguna": (_glm(),),
    "longcat": (_glm("longcat_", may_be_empty=False), _JSON),
    "qwen3_coder": (
        _Tags(
            "\n<function={name}>\n",
            "<parameter={key}>\n",
            "</parameter>",
            "</function>\n",
            _as_qwen3_coder,
            r"null|[\[{].*",
        ),
    ),
    "minimax_m2": (_invoke("", _as_minimax, _NULLS),),
    "minicpm5": (_Tags('"{name}">', '<param name="{key}">', "</param>", "", _as_minimax, _NULLS, has_cdata=True),),
    "muse_spark": (_invoke("atem:", _as_muse_spark, _LIKE_JSON, reads_json=True),),
    "function_gemma": (_Gemma("<escape>", is_nested=False, without=("}",)),),
    "gemma4": (_Gemma('<|"|>', is_nested=True),),
    "pythonic": (_Python(),),
}
"""By the name of mlx-lm's parser; the first one that can write a tool is taken, and a plain call if none can."""


def call_grammar(choice: ToolChoice, tools: Sequence[Mapping[str, Any]], tokens: CallTokens) -> str:
    """One call of one of the tools, or of the tool that `choice` names, and nothing else, in Lark.

    Each tool's parameters are a schema of their own, so that references inside it keep their meaning.

    Raises:
        GuideRefused: a tool is none, or the named one is not among them.
    """
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [found for tool in tools if (found := _function(tool))["name"] == wanted or wanted is None]
    if not functions:
        raise GuideRefused(f"'tool_choice' names {wanted!r}, which is not in 'tools'")
    rules = [f"start: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    rules += [r"LINE: /\n?/", "SPACE: / ?/", "INDEX: /[0-9]{1,4}/"]
    rules += [r"RECIPIENT: /to=[\w.-]{1,80}/ & ~/to=(self|user|commentary)/"]
    for index, function in enumerate(functions):
        rules += _call_rules(f"call_{index}", function["name"], function.get("parameters") or {}, tokens)
    return "\n".join(rules)


def _call_rules(rule: str, name: str, schema: Schema, tokens: CallTokens) -> list[str]:
    """The rule of one tool's call, and those that it names."""
    notations = _NOTATIONS.get(tokens.parser or "", ())
    if "[ARGS]" not in tokens.added:
        notations = tuple(one for one in notations if one is not _HEADER)
    for notation in notations:
        writer = _Writer(tokens, rule, name, schema)
        try:
            call = notation.call(writer)
        except (AttributeError, TypeError, ValueError, RecursionError):  # llguidance tells what is wrong with a schema
            call = None
        if call is not None:
            start, end = (tokens.items(marker, is_marker=True) for marker in (tokens.start, tokens.end))
            header = _header(writer) if tokens.has_headers else ""
            return [f"{rule}: {header} {start} {call} {end}", *writer.rules]
    if tokens.has_headers:
        raise GuideRefused(f"this model writes headers in its answers, and its notation cannot write tool {name!r}")
    writer = _Writer(tokens, rule, name, schema)
    return [f"{rule}: {_PLAIN.call(writer)}", *writer.rules]


def _header(writer: _Writer) -> str:
    """That of the message with the call, after any number of thoughts."""
    thought = writer.text(_Text(), "<|eom|>", without=("<|start|>",), stripped=False)
    start, middle = (writer.tokens.items(marker) for marker in ("<|start|>assistant", "<|message|>"))
    return f'(SPACE "to=self" {middle} {thought} LINE {start})* SPACE RECIPIENT {middle}'


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
