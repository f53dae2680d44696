"""Cuts an answer into thinking, tool calls and text, by the markers between them. Pure.

It follows the markers as mlx-lm's state machine does, but keeps every character: the parts, joined, are the answer. It
differs in two cases in which a model only mentions a marker: thinking that the model closes contains no calls, and text
that does not parse as a call stays where it is.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

State = Literal["normal", "reasoning", "tool", "header"]
"""The kind of text at a place in an answer; a `header` belongs to a message and is not shown."""


class Edge(NamedTuple):
    """In `state`, the text `marker` leads to the state `to`. An empty marker would make the search loop for ever."""

    state: State
    marker: Annotated[str, Field(min_length=1)]
    to: State


class Markers(BaseModel):
    """The markers of one answer. Unknown fields are ignored, because a reader may be older than the worker.

    Attributes:
        first: the state in which the answer begins.
        edges: the markers, and the states to which they lead. No edge leaves a call, which ends with its closing
            marker; and no edge leads into one if calls are to stay text.
        is_call: whether the whole answer behind its thinking is one call, with markers or without.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    first: State = "normal"
    edges: tuple[Edge, ...] = ()
    is_call: bool = False

    def are_one_call(self, state: State, text: str, at: int, found: "tuple[int, Edge] | None") -> bool:
        """True if the text from `at` on is one call, whatever markers it contains. Only thinking may come before a
        call. `found` is the next edge out of `state`, with its position."""
        return self.is_call and state == "normal" and (found is None or bool(text[at : found[0]].strip()))


Kind = Literal["text", "reasoning", "call", "markup"]
"""`markup` is a marker or a header; the text of a `call` includes its markers."""

ReadCalls = Callable[[str, bool], str | None]
"""Takes the text between a call's markers, and whether the closing marker is there. Returns ``None``, or why the text
is not a call."""


class AnswerPart(NamedTuple):
    kind: Kind
    text: str


@dataclass
class Parts:
    """The parts of one answer so far. `error`: why the first text that looks like a call is not one."""

    found: list[AnswerPart] = field(default_factory=list)
    error: str | None = None

    def add(self, kind: Kind, text: str) -> None:
        if text:
            self.found.append(AnswerPart(kind, text))

    @property
    def said(self) -> str:
        """The text, with all its white space."""
        return "".join(part.text for part in self.found if part.kind == "text")

    @property
    def content(self) -> str:
        """The text without white space at its end; at its beginning, white space stays only if the answer begins with
        text."""
        opening = takewhile(lambda part: part.kind == "text", self.found)
        begins_with_text = any(part.text.strip() for part in opening)
        return self.said.rstrip() if begins_with_text else self.said.strip()

    @property
    def reasoning(self) -> str:
        """The thinking, without white space around each piece."""
        thoughts = (part.text.strip() for part in self.found if part.kind == "reasoning")
        return "\n".join(filter(None, thoughts))


def cut(text: str, markers: Markers, read_calls: ReadCalls, tool_end: str | None) -> Parts:
    """The parts of a complete answer.

    Args:
        read_calls: gets each call without its markers, but the call of an answer that `is_call` with them.
        tool_end: the marker after a call; if it is empty, a call lasts to the end of the answer.
    """
    parts, next_place = Parts(), _Places(text)
    edges: Sequence[Edge] = markers.edges
    at, state = 0, markers.first
    while at < len(text):
        found = _next_edge(next_place, at, [edge for edge in edges if edge.state == state])
        if markers.are_one_call(state, text, at, found):
            parts.error = read_calls(text[at:], True)
            parts.add("call" if parts.error is None else "text", text[at:])
            break
        if found is None:
            parts.add("reasoning" if state == "reasoning" else "text", text[at:])
            break
        place, edge = found
        parts.add(_kind(state), text[at:place])
        inside = place + len(edge.marker)
        if edge.to != "tool":
            parts.add("markup", edge.marker)
            at, state = inside, edge.to
            continue
        close = text.find(tool_end, inside) if tool_end else -1
        stop, at = (close, close + len(tool_end or "")) if close >= 0 else (len(text), len(text))
        error = read_calls(text[inside:stop], close >= 0 or not tool_end)
        if error is None:
            parts.add("call", text[place:at])
            state = "normal"
            continue
        parts.error = parts.error or error
        if close < 0:  # no later call can be complete; thinking may still end
            edges, at = [edge for edge in edges if edge.to != "tool"], inside
        parts.add(_kind(state) if state == "reasoning" else "text", text[place:at])
        state = "reasoning" if state == "reasoning" else "normal"
    return parts


class Cutter:
    """Cuts a growing answer. It reads only the text behind the last certain marker, so that a long answer with many
    markers is not cut anew for each piece."""

    def __init__(self, markers: Markers) -> None:
        self.markers: Final = markers
        self._at, self._state = 0, markers.first
        self._certain = Parts()

    def cut_so_far(self, text: str) -> Parts:
        """The parts that are certain in every answer that begins with `text`, which continues the text of the last
        call.

        Their `content` and `reasoning` are prefixes of the complete answer's. They end where a marker may have begun,
        and before the first call, because only the complete answer shows whether it is a call.
        """
        next_place = _Places(text)
        while True:
            edges = [edge for edge in self.markers.edges if edge.state == self._state]
            found = _next_edge(next_place, self._at, edges)
            if self.markers.are_one_call(self._state, text, self._at, found):
                return Parts([*self._certain.found])
            stop = _begun_marker(text, self._at, edges)
            if found is None or found[0] >= stop or found[1].to == "tool":
                break
            place, edge = found
            self._certain.add(_kind(self._state), text[self._at : place])
            self._certain.add("markup", edge.marker)
            self._at, self._state = place + len(edge.marker), edge.to
        parts = Parts([*self._certain.found])
        parts.add(_kind(self._state), text[self._at : stop if found is None else min(found[0], stop)])
        return parts


def _kind(state: State) -> Kind:
    return "reasoning" if state == "reasoning" else "markup" if state == "header" else "text"


class _Places:
    """Finds markers from left to right: one pass over the text for each marker. `end` is the text's length."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.end = len(text)
        self._found: dict[str, int] = {}

    def __call__(self, marker: str, at: int) -> int:
        """The first position of `marker` from `at` on, or `end`. `at` never decreases."""
        if self._found.get(marker, -1) < at:
            place = self._text.find(marker, at)
            self._found[marker] = place if place >= 0 else self.end
        return self._found[marker]


def _next_edge(next_place: _Places, at: int, edges: list[Edge]) -> tuple[int, Edge] | None:
    """The first marker from `at` on, and its position. In thinking, a marker of a call ranks behind all others."""
    places = [(place, edge) for edge in edges if (place := next_place(edge.marker, at)) < next_place.end]
    return min(
        places, key=lambda found: (found[1].to == "tool" and found[1].state == "reasoning", found[0]), default=None
    )


def _begun_marker(text: str, at: int, edges: Collection[Edge]) -> int:
    """Where, from `at` on, the text ends in an unfinished marker; the text's length if it does not."""
    markers, end = [edge.marker for edge in edges], len(text)
    longest = max(map(len, markers), default=0)
    for place in range(max(at, end - longest + 1), end):
        begun = text[place:]
        if any(len(marker) > len(begun) and marker.startswith(begun) for marker in markers):
            return place
    return end
