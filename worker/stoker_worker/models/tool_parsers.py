"""A time limit for mlx-lm's tool parsers: some of their patterns take minutes on a text that a looping model writes.

Owns the patterns of the parsers' modules, which it replaces. Any thread; imports neither MLX nor mlx-lm.
"""

from collections.abc import Callable
from typing import Any, Final

import regex

from stoker_worker.ports.model import ToolParser

_MOST_S: Final = 5.0
"""CPU time of the whole process, as `regex` counts it, for one search. A call of 100 kB takes some milliseconds."""


def with_time_limit(parser: ToolParser | None, most_s: float = _MOST_S) -> ToolParser | None:
    """The parser; from now on, each search of a pattern of its module raises `TimeoutError` after `most_s`."""
    names = getattr(parser, "__globals__", {})
    for name, value in [*names.items()]:
        if isinstance(value, regex.Pattern):
            names[name] = _LimitedPattern(value, most_s)
    return parser


class _LimitedPattern:
    """In place of a `regex.Pattern`, with the methods that search."""

    def __init__(self, pattern: Any, most_s: float) -> None:
        self._pattern = pattern
        self._most_s = most_s

    def findall(self, text: str, *args: Any) -> Any:
        return self._limited(self._pattern.findall, text, *args)

    def finditer(self, text: str, *args: Any) -> Any:
        return self._limited(self._pattern.finditer, text, *args)

    def match(self, text: str, *args: Any) -> Any:
        return self._limited(self._pattern.match, text, *args)

    def search(self, text: str, *args: Any) -> Any:
        return self._limited(self._pattern.search, text, *args)

    def _limited(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(*args, timeout=self._most_s)
