"""Patterns of Rust's dialect. Pure.

Python's `re` may take for ever to find one; this takes time in proportion to the text and to the pattern, with its
counted repetitions written out. Both hold up all threads meanwhile, so the pattern's length is bounded.
"""

import re
from functools import lru_cache
from typing import Final

from pydantic import ValidationError
from pydantic_core import SchemaError, SchemaValidator, core_schema

_MOST_WRITTEN_OUT: Final = 10_000
"""Characters; a text of 100,000 characters then takes some ten seconds in the worst case."""

_MOST_CHARACTERS: Final = 40_000
"""Of the pattern as it is given: the parser takes up to seven kilobytes for four of them, before it refuses any."""

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
