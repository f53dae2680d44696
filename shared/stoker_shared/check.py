"""The check that an answer has to pass, as a job carries it, and its patterns. Pure; `checking` evaluates it.

Patterns are of Rust's dialect. Python's `re` may take for ever to find one; this takes time in proportion to the text
and to the pattern, with its counted repetitions written out. Both hold up all threads meanwhile, so the pattern's
length is bounded.
"""

import re
from functools import lru_cache
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import SchemaError, SchemaValidator, core_schema

from stoker_shared.message import as_tuple
from stoker_shared.result import FinishReason

_Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=64, fail_fast=True), BeforeValidator(as_tuple)
]


class Check(BaseModel):
    """An answer is accepted if all that is set here holds. Texts are looked for in the answer without thinking and
    without tool calls.

    Attributes:
        json_schema: the answer is JSON that is valid for this schema (2020-12; `format` is not checked, and a `$ref`
            stays within the schema).
        regex: a pattern in Rust's dialect that is found somewhere in the answer; ``^(?:...)$`` for the whole of it.
        contains, forbids: texts that are in the answer, or not.
        min_mean_logprob: the least mean log-probability of the answer's tokens, 0 or below; needs `logprobs`.
        finish_reason: the accepted ones.
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
                require_pattern(self.regex)
            except NoPattern as error:
                raise ValueError(f"'regex' cannot be read: {error}") from None
        return self


_MOST_WRITTEN_OUT: Final = 10_000
"""Characters; a text of 100,000 characters then takes some ten seconds in the worst case."""

_MOST_CHARACTERS: Final = 40_000
"""The pattern's length as it is given: the parser takes up to seven kilobytes for four characters, before it refuses
any."""

_TOKEN: Final = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|\[[^\]]*\]|[^\]\\])*\])|\\[pPxuU]\{[^}]*\}|\\."
    r"|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\}|\(\?[a-zA-Z]*(?P<comments>x)|.",
    re.DOTALL,
)


class NoPattern(ValueError):
    """It is no pattern of this dialect, or too large."""


def require_pattern(regex: str) -> None:
    """
    Raises:
        NoPattern: as the name says.
    """
    _compiled(regex)


def is_found(regex: str, text: str) -> bool:
    """Whether the pattern is somewhere in the text.

    Raises:
        NoPattern: as `require_pattern`.
    """
    try:
        _compiled(regex).validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=16)  # each may take 14 MB
def _compiled(regex: str) -> SchemaValidator:
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
    """About how many characters the pattern has without counted repetitions.

    Raises:
        NoPattern: it has the flag `x`: comments could hide what is counted.
    """
    outer: list[int] = []
    length = last = 0
    for token in _TOKEN.finditer(regex):
        if token["comments"]:
            raise NoPattern("the flag x is not supported")
        if token["least"]:
            times = int(token["most"] or token["least"])
            length, last = length + last * (times - 1), last * times
        elif token[0] == "(":
            outer.append(length)
            length = 0
        elif token[0] == ")" and outer:
            last = length
            length += outer.pop()
        elif token[0] not in "*+?|^$":
            length, last = length + 1, 1
    return length + sum(outer)
