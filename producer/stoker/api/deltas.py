"""The pieces of an answer that may be sent while it is generated: first certain text, then the rest. Pure.

Owns the record of the sent text, which cannot be taken back: all later text of the job, from the same run, another run
or the result, must continue it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.api.failure import Failure
from stoker.streaming import Restarted, StreamEvent, TextChunk
from stoker_shared.answer_parts import Cutter
from stoker_shared.result import Choice, ToolCall


@dataclass(frozen=True)
class Delta:
    """The next piece of an answer.

    Attributes:
        kind: `text` and `reasoning` continue the sent text of that kind; `call` is a complete tool call.
        text: empty for a call.
        number: index of the call, from 0.
    """

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None
    number: int = 0


class Deltas:
    """The deltas of one choice. `is_raw`: the text is sent as generated, with its markers, as one kind."""

    def __init__(self, *, is_raw: bool) -> None:
        self._is_raw = is_raw
        self._run = ""
        self._cutter: Cutter | None = None
        self._sent: dict[Literal["reasoning", "text"], str] = {"reasoning": "", "text": ""}

    def add(self, event: StreamEvent) -> list[Delta]:
        """The deltas to send after this event; none while a restarted job catches up. Raises `Failure`: the text of the
        new run differs from the sent text."""
        if isinstance(event, Restarted):
            self._run, self._cutter = "", None
            return []
        self._run += event.text
        return self._news(self._parts_so_far(event), is_whole=False)

    def rest(self, choice: Choice) -> list[Delta]:
        """The missing deltas once the job has ended: thinking, text, and the calls, each complete. Raises `Failure`:
        the answer does not begin with the sent text."""
        if self._is_raw:
            return self._news({"text": choice.text}, is_whole=True)
        deltas = self._news({"reasoning": choice.reasoning or "", "text": content_of(choice) or ""}, is_whole=True)
        calls = enumerate(choice.tool_calls or ())
        return [*deltas, *(Delta("call", call=call, number=number) for number, call in calls)]

    def _parts_so_far(self, chunk: TextChunk) -> dict[Literal["reasoning", "text"], str]:
        if self._is_raw:
            return {"text": self._run}
        if chunk.markers is None:
            return {}
        if self._cutter is None or self._cutter.markers != chunk.markers:
            self._cutter = Cutter(chunk.markers)
        parts = self._cutter.cut_so_far(self._run)
        return {"reasoning": parts.reasoning, "text": parts.content}

    def _news(self, parts: Mapping[Literal["reasoning", "text"], str], *, is_whole: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for kind, text in parts.items():
            sent = self._sent[kind]
            if not text.startswith(sent) and (is_whole or not sent.startswith(text)):
                message = "the worker was lost, and the text that came again differs from what was sent; ask again"
                raise Failure(500, message, code="text_changed", retryable=True)
            if new := text[len(sent) :]:
                deltas.append(Delta(kind, new))
                self._sent[kind] = text
        return deltas


def content_of(choice: Choice) -> str | None:
    """The answer's text; ``None`` if the model only calls tools."""
    return None if choice.tool_calls and not choice.content.strip() else choice.content
