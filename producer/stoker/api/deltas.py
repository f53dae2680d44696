"""The pieces of an answer that may be sent while it is generated: what is certain, then the rest. Pure.

Owns what was sent. It cannot be taken back: whatever comes later, of the same run of the job, of another one, or as its
result, must continue it.
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
        kind: `text` and `reasoning` continue what was sent of that kind; `call` is a whole call of a tool.
        text: empty for a call.
        number: of the call, from 0 on.
    """

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None
    number: int = 0


class Deltas:
    """The deltas of one choice.

    Args:
        is_raw: the text is sent as it was generated, with its markers, as one kind.
    """

    def __init__(self, *, is_raw: bool) -> None:
        self._is_raw = is_raw
        self._run = ""
        self._cutter: Cutter | None = None
        self._sent: dict[Literal["reasoning", "text"], str] = {"reasoning": "", "text": ""}

    def add(self, event: StreamEvent) -> list[Delta]:
        """The deltas to send after this event; none while a restarted job catches up.

        Raises:
            Failure: the new text is another one.
        """
        if isinstance(event, Restarted):
            self._run, self._cutter = "", None
            return []
        self._run += event.text
        return self._news(self._parts_so_far(event), is_whole=False)

    def rest(self, choice: Choice) -> list[Delta]:
        """The deltas that are missing once the job has ended: thinking, text, and the calls, each whole.

        Raises:
            Failure: the answer does not begin with what was sent.
        """
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
                raise Failure(500, message, kind="server_error", code="text_changed", retryable=True)
            if new := text[len(sent) :]:
                deltas.append(Delta(kind, new))
                self._sent[kind] = text
        return deltas


def content_of(choice: Choice) -> str | None:
    """The answer's text; ``None`` if the model only calls tools."""
    return None if choice.tool_calls and not choice.content.strip() else choice.content
