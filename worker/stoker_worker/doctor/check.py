"""A check and what it found. Pure; owns the rule that a check never crashes the command."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from stoker_shared.text import one_line

_UNEXPECTED: Final = "this check could not be made; the line says why"


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        line: for a reader, in one line; without prompts and passwords.
        advice: what to do about it; empty if it is `ok`.
        figures: the same as numbers, texts and booleans, for the file. Names end in their unit.
    """

    status: Status
    line: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check by its name. `look` may raise anything."""

    name: str
    look: Callable[[], Finding]

    def made(self) -> Finding:
        """What it found; an exception is a failure with one line."""
        try:
            return self.look()
        except Exception as error:
            return fail(one_line(error), _UNEXPECTED)


def ok(line: str, **figures: Any) -> Finding:
    return Finding(Status.OK, line, figures=figures)


def warn(line: str, advice: str, **figures: Any) -> Finding:
    return Finding(Status.WARN, line, advice, figures)


def fail(line: str, advice: str, **figures: Any) -> Finding:
    return Finding(Status.FAIL, line, advice, figures)
