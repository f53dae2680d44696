"""The markers that tell the parts of an answer apart. Plain values; they go with the text of a job's stream."""

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

State = Literal["normal", "reasoning", "tool", "header"]
"""Of a place in an answer: text, thinking, inside a tool call, or a message's header, which is no text."""


class Edge(NamedTuple):
    """In `state`, the text `marker` leads to the state `to`. An empty one would be found in one place for ever."""

    state: State
    marker: Annotated[str, Field(min_length=1)]
    to: State


class Markers(BaseModel):
    """Those of one answer. Unknown fields are ignored, because a reader may be older than the worker.

    Attributes:
        first: the state in which the answer begins.
        edges: how markers lead from state to state, without those out of a call; also without those into one if calls
            stay text.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    first: State = "normal"
    edges: tuple[Edge, ...] = ()
