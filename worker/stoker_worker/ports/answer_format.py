"""The markers by which a model's answer tells thinking, tool calls and text apart. Plain values; no I/O, no MLX."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_shared.answer_parts import Edge, Markers, State

ToolParser = Callable[[str, Sequence[Mapping[str, Any]] | None], Any]
"""From the text between a call's markers, and the request's tools, to a dict with `name` and `arguments`, or a list of
them. It may raise anything, and return anything. Any thread."""

_MOST_AFTER_THINK_START: Final = 4
"""Most tokens that a template writes after the marker: a line break, perhaps a word. A turn has more."""


@dataclass(frozen=True)
class AnswerFormat:
    """The form of a model's answers.

    Attributes:
        think_start, think_end: the markers around thinking; ``None`` for a model without any.
        think_start_ids, think_end_ids: their token ids; empty for a model without any.
        tool_start: the marker before a call; ``None`` for a model without a tool parser.
        tool_end: the marker after it; ``""``: calls last to the end of the answer.
        tool_start_ids: the token ids of `tool_start`.
        tool_parser: the name of mlx-lm's parser, such as ``qwen3_coder``.
        parse_call: that parser.
        is_json_call: whether the text between the markers is the JSON object ``{"name": ..., "arguments": {...}}``.
        edges: how markers lead from state to state, as in mlx-lm's state machine.
        first_state: of an answer whose prompt does not open the thinking.
    """

    think_start: str | None = None
    think_end: str | None = None
    think_start_ids: tuple[int, ...] = ()
    think_end_ids: tuple[int, ...] = ()
    tool_start: str | None = None
    tool_end: str | None = None
    tool_start_ids: tuple[int, ...] = ()
    tool_parser: str | None = None
    parse_call: ToolParser | None = None
    is_json_call: bool = False
    edges: tuple[Edge, ...] = ()
    first_state: State = "normal"

    def markers(self, first: State, *, with_calls: bool) -> Markers:
        """Those of an answer that begins in the state `first`. `with_calls`: tools are offered."""
        takes_calls = with_calls and self.parse_call is not None
        edges = (edge for edge in self.edges if edge.state != "tool" and (takes_calls or edge.to != "tool"))
        return Markers(first=first, edges=tuple(edges))

    def opening(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The end of the prompt, from the marker on with which the template opens the thinking; empty if it does not.

        Thinking that an earlier answer left open, cut off by `max_tokens`, does not count.
        """
        if not self.think_start_ids:
            return ()
        tail = tuple(prompt_ids[-len(self.think_start_ids) - _MOST_AFTER_THINK_START :])
        opened, closed = last_place(tail, self.think_start_ids), last_place(tail, self.think_end_ids)
        return tail[opened:] if opened > closed else ()

    def state_after(self, prompt_ids: Sequence[int]) -> State:
        """The state in which the answer to a prompt begins."""
        return "reasoning" if self.opening(prompt_ids) else self.first_state


PLAIN_TEXT: Final = AnswerFormat()
"""Of a model without thinking and without a tool parser."""


def last_place(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """The last index at which `ids` has `wanted`; -1 if it has not."""
    places = range(len(ids) - len(wanted), -1, -1)
    return next((at for at in places if tuple(ids[at : at + len(wanted)]) == tuple(wanted)), -1)
