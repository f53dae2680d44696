"""Cuts the text of an answer into thinking, tool calls and text. Pure; finisher threads.

Follows the markers as mlx-lm's state machine does, but keeps every character: the parts, put together, are the text.
Two differences, where a model only mentions a marker: thinking that the model closes has no calls in it, and what does
not parse stays where it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stoker_worker.ports.answer_format import AnswerFormat, Edge, State

Kind = Literal["text", "reasoning", "call", "markup"]
"""`markup` are the markers themselves, and headers; a `call` has its markers."""

ReadCalls = Callable[[str, bool], str | None]
"""Takes the text between a call's markers, and whether the closing one is there. Returns why it is no call, if it is
none."""


class Part(NamedTuple):
    kind: Kind
    text: str


@dataclass
class Parts:
    """The parts of one answer so far.

    Attributes:
        error: why the first text that looks like a call is none.
    """

    found: list[Part] = field(default_factory=list)
    error: str | None = None

    def add(self, kind: Kind, text: str) -> None:
        if text:
            self.found.append(Part(kind, text))


def cut(text: str, form: AnswerFormat, state: State, read_calls: ReadCalls | None) -> Parts:
    """
    Args:
        state: in which the answer begins.
        read_calls: takes each call; ``None``: calls stay text.
    """
    parts, next_place = Parts(), _Places(text)
    edges = [edge for edge in form.edges if edge.state != "tool" and (read_calls or edge.to != "tool")]
    at = 0
    while at < len(text):
        found = _next_edge(next_place, at, [edge for edge in edges if edge.state == state])
        if found is None:
            parts.add("reasoning" if state == "reasoning" else "text", text[at:])
            break
        place, edge = found
        parts.add(_kind(state), text[at:place])
        inside = place + len(edge.marker)
        if edge.to != "tool" or read_calls is None:
            parts.add("markup", edge.marker)
            at, state = inside, edge.to
            continue
        close = text.find(form.tool_end, inside) if form.tool_end else -1
        stop, at = (close, close + len(form.tool_end or "")) if close >= 0 else (len(text), len(text))
        error = read_calls(text[inside:stop], close >= 0 or not form.tool_end)
        if error is None:
            parts.add("call", text[place:at])
            state = "normal"
            continue
        parts.error = parts.error or error
        if close < 0:  # no call after it can be whole; thinking may still end
            edges, at = [edge for edge in edges if edge.to != "tool"], inside
        parts.add(_kind(state) if state == "reasoning" else "text", text[place:at])
        state = "reasoning" if state == "reasoning" else "normal"
    return parts


def _kind(state: State) -> Kind:
    return "reasoning" if state == "reasoning" else "markup" if state == "header" else "text"


class _Places:
    """Finds markers from left to right. It reads the text once for each marker, however often it is asked.

    Attributes:
        end: the text's length.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.end = len(text)
        self._found: dict[str, int] = {}

    def __call__(self, marker: str, at: int) -> int:
        """The first place of `marker` from `at` on, which never goes back; `end` if there is none."""
        if self._found.get(marker, -1) < at:
            place = self._text.find(marker, at)
            self._found[marker] = place if place >= 0 else self.end
        return self._found[marker]


def _next_edge(next_place: _Places, at: int, edges: list[Edge]) -> tuple[int, Edge] | None:
    """The first marker from `at` on, and its place. In thinking, a call comes after every other marker."""
    places = [(place, edge) for edge in edges if (place := next_place(edge.marker, at)) < next_place.end]
    return min(
        places, key=lambda found: (found[1].to == "tool" and found[1].state == "reasoning", found[0]), default=None
    )
