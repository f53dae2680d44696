"""The check that a job sets for its answer, and its evaluation. Pure; both sides use it.

Patterns use Rust's dialect. Python's `re` may need exponential time for a search; Rust's engine needs time in
proportion to the text and to the pattern with its counted repetitions written out. Both block all other threads, so the
pattern's length is limited.

A JSON Schema comes from outside and may be hostile. Reading it and applying it to one answer are limited in time, and a
`$ref` resolves only within the schema or jsonschema's own package. A schema may not choose its dialect by `$schema`,
because jsonschema's own classes have no such limits.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import SchemaError, SchemaValidator, core_schema

from stoker_shared.errors import InvalidRequest
from stoker_shared.job_data import refuse_constant
from stoker_shared.message import as_tuple
from stoker_shared.result import Choice, FinishReason

_Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=64, fail_fast=True), BeforeValidator(as_tuple)
]


class Check(BaseModel):
    """An answer is accepted if it meets all conditions that are set. Conditions on text apply to the answer without its
    thinking and its tool calls.

    Attributes:
        json_schema: the answer is JSON that is valid for this schema (2020-12; `format` is not checked, and a `$ref`
            stays within the schema).
        regex: a pattern in Rust's dialect, found anywhere in the answer; use ``^(?:...)$`` to match all of it.
        contains, forbids: texts that must, or must not, be in the answer.
        min_mean_logprob: the least mean log-probability of the answer's tokens, 0 or below; needs `logprobs`.
        finish_reason: the accepted reasons.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    json_schema: dict[str, Any] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    contains: _Texts = ()
    forbids: _Texts = ()
    min_mean_logprob: Annotated[float, Field(le=0.0)] | None = None
    finish_reason: Annotated[
        tuple[FinishReason, ...], Field(max_length=8, fail_fast=True), BeforeValidator(as_tuple)
    ] = ()

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not any(value is not None and value != () for value in dict(self).values()):
            raise ValueError("at least one condition must be given")
        if self.regex is not None:
            try:
                _compiled(self.regex)
            except NoPattern as error:
                raise ValueError(f"'regex' cannot be read: {error}") from None
        return self


_MOST_WRITTEN_OUT: Final = 10_000
"""Characters; a search in 100,000 characters then takes about ten seconds in the worst case."""

_MOST_CHARACTERS: Final = 40_000
"""Characters of the pattern as given: the parser takes up to 7 KB for every four of them before it can refuse any."""

_TOKEN: Final = re.compile(
    r"\(\?P?<[^>]*>|(?P<class>\[\^?\]?(?:\\.|\[[^\]]*\]|[^\]\\])*\])|\\[pPxuU]\{[^}]*\}|\\."
    r"|\{\s*(?P<least>\d+)\s*(?P<comma>,\s*(?P<most>\d*)\s*)?\}|\(\?[a-zA-Z]*(?P<comments>x)|.",
    re.DOTALL,
)


class NoPattern(ValueError):
    """The pattern is not of Rust's dialect, or is too large."""


def is_found(regex: str, text: str) -> bool:
    """True if the pattern matches anywhere in the text. Raises `NoPattern`."""
    try:
        _compiled(regex).validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=16)  # each may take 14 MB
def _compiled(regex: str) -> SchemaValidator:
    """Raises `NoPattern`."""
    if len(regex) > _MOST_CHARACTERS:
        raise NoPattern(f"it is longer than {_MOST_CHARACTERS:,} characters")
    try:
        compiled = SchemaValidator(core_schema.str_schema(pattern=regex, regex_engine="rust-regex"))
    except SchemaError as error:
        raise NoPattern(str(error).splitlines()[-1].strip()[:200]) from None
    if _written_out(regex) > _MOST_WRITTEN_OUT:
        raise NoPattern(f"with its repetitions written out it is longer than {_MOST_WRITTEN_OUT:,} characters")
    return compiled


def _written_out(regex: str) -> int:
    """The pattern's approximate length in characters with counted repetitions written out. Raises `NoPattern`: it has
    the flag `x`, whose comments could hide characters from the count."""
    outer: list[int] = []
    length = last = 0
    for token in _TOKEN.finditer(regex):
        if token["comments"]:
            raise NoPattern("the flag x is not supported")
        if token["least"]:
            times = int(token["most"] or token["least"])
            length, last = length + last * (times - 1), last * times
        elif token[0].startswith("("):
            outer.append(length)
            length = 0
        elif token[0] == ")" and outer:
            last = max(length, 1)
            length = outer.pop() + last
        elif token[0] not in "*+?|^$":
            length, last = length + 1, 1
    return length + sum(outer)


_REASON_CHARACTERS: Final = 200


def rejection(check: Check, answer: Choice) -> str | None:
    """Why the check rejects the answer: one line that begins with the condition's name. ``None`` if it is accepted."""
    reason = _first_fault(check, answer)
    # The answer's JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
    return None if reason is None else reason[:_REASON_CHARACTERS].encode(errors="replace").decode()


def make_ready(check: Check) -> None:
    """Raises `InvalidRequest`: the schema is invalid, has a pattern or reference that cannot be used, or takes too long
    to read; or the package jsonschema is missing."""
    if check.json_schema is not None:
        _validator(_as_text(check.json_schema))


def _first_fault(check: Check, answer: Choice) -> str | None:
    text = answer.content
    if check.finish_reason and answer.finish_reason not in check.finish_reason:
        return f"finish_reason: {answer.finish_reason}"
    if (missing := next((part for part in check.contains if part not in text), None)) is not None:
        return f"contains: {missing!r} is missing"
    if (found := next((part for part in check.forbids if part in text), None)) is not None:
        return f"forbids: {found!r} is there"
    if check.regex is not None and not is_found(check.regex, text):
        return "regex: not found"
    if check.min_mean_logprob is not None:
        tokens = answer.logprobs.content if answer.logprobs is not None else []
        mean = sum(token.logprob for token in tokens) / len(tokens) if tokens else float("-inf")
        if mean < check.min_mean_logprob:
            return f"min_mean_logprob: {mean:.3f}"
    fault = _schema_fault(check.json_schema, text) if check.json_schema is not None else None
    return None if fault is None else f"json_schema: {fault}"


_MOST_S: Final = 3.0
"""Seconds of processor time, for reading a schema and for applying it to one answer."""

_time = threading.local()


class _TooMuch(Exception):
    """The work on a schema is over its bound."""


def _schema_fault(schema: dict[str, Any], text: str) -> str | None:
    """The keyword and the place of an answer's first fault; ``None`` if it is valid.

    It never raises: the turn may be saved already. A schema that could be read before and cannot be now rejects the
    answer instead of failing the job.
    """
    try:
        validator = _validator(_as_text(schema))
    except InvalidRequest as unreadable:
        return f"the schema cannot be applied ({str(unreadable).removeprefix('check.json_schema: ')})"
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return "the answer is not JSON"
    try:
        error = _first_error(validator, value)
    except Exception as raised:  # whatever goes wrong in a schema concerns one answer only
        return f"the schema cannot be applied ({type(raised).__name__.lstrip('_')})"
    return None if error is None else f"{error.validator!r} at {error.json_path}"


@cache
def _dialect() -> tuple[Any, Any]:
    """The class of validators for answers, and the validator for schemas."""
    try:
        from jsonschema import Draft202012Validator, FormatChecker
        from jsonschema.validators import extend
    except ImportError:
        raise InvalidRequest("check.json_schema: the package jsonschema is not installed here") from None
    ours = extend(Draft202012Validator, {"pattern": _pattern, "uniqueItems": _unique_items})
    descend = ours.descend

    def descend_in_time(self: Any, *args: Any, **options: Any) -> Any:
        _look_at_the_clock()
        return descend(self, *args, **options)

    def evolve(self: Any, **changes: Any) -> Any:
        _look_at_the_clock()
        return ours(
            changes.get("schema", self.schema),
            format_checker=self.format_checker,
            registry=self._registry,
            _resolver=changes.get("_resolver", self._resolver),
        )

    ours.descend, ours.evolve = descend_in_time, evolve
    formats = FormatChecker(formats=())
    formats.checks("regex", raises=NoPattern)(_is_pattern)
    return ours, ours(Draft202012Validator.META_SCHEMA, format_checker=formats)


def _look_at_the_clock() -> None:
    if time.thread_time() > _time.until:
        raise _TooMuch


def _first_error(validator: Any, value: Any) -> Any:
    _time.until = time.thread_time() + _MOST_S
    return next(validator.iter_errors(value), None)


@lru_cache(maxsize=8)  # each may take 30 MB
def _validator(schema_text: str) -> Any:
    of_answers, of_schemas = _dialect()
    schema = json.loads(schema_text)
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    try:
        _require_supported(schema)
        if (error := _first_error(of_schemas, schema)) is not None:
            raise InvalidRequest(f"check.json_schema: at {error.json_path}: {error.message[:_REASON_CHARACTERS]}")
        validator = of_answers(schema, registry=Registry())
        _require_references(DRAFT202012.create_resource(schema), validator._resolver)
    except RecursionError:
        raise InvalidRequest("check.json_schema: it is nested too deeply") from None
    except _TooMuch:
        raise InvalidRequest("check.json_schema: it is too large") from None
    return validator


def _require_supported(schema: Any) -> None:
    """Raises `InvalidRequest`: it has `patternProperties`; jsonschema matches these with Python's `re` in several
    places."""
    if isinstance(schema, dict) and isinstance(schema.get("patternProperties"), dict):
        raise InvalidRequest("check.json_schema: 'patternProperties' is not supported; see 'propertyNames'")
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _require_supported(part)


def _require_references(schema: Any, resolver: Any) -> None:
    from referencing.exceptions import Unresolvable

    _look_at_the_clock()
    if isinstance(schema.contents, dict) and (ref := schema.contents.get("$ref")) is not None:
        try:
            resolver.lookup(ref)
        except Unresolvable:
            raise InvalidRequest(f"check.json_schema: the schema does not have what $ref {ref!r} names") from None
    for part in schema.subresources():
        _require_references(part, resolver.in_subresource(part))


def _pattern(validator: Any, regex: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError as Fault

    if validator.is_type(instance, "string") and not is_found(regex, instance):
        yield Fault("pattern")


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[Any]:
    """Replaces jsonschema's own, which compares each item with every other one."""
    from jsonschema import ValidationError as Fault

    if wanted and validator.is_type(instance, "array") and len(set(map(_key, instance))) < len(instance):
        yield Fault("uniqueItems")


def _key(value: Any) -> Any:
    """Equal for two JSON values if, and only if, they are equal."""
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _key(item)) for name, item in value.items())
    return isinstance(value, bool), value  # in Python, 1 == True


def _is_pattern(regex: object) -> bool:
    if isinstance(regex, str):
        _compiled(regex)
    return True


def _as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)
