"""The pieces in which a client gets one answer: what is certain while it is generated, and the rest at its end. Pure.

Owns what was sent. It cannot be taken back: whatever comes later, of the same run of the job, of another one, or as its
result, must continue it.
"""

from typing import Any, TypeAlias

from stoker.openai.answers import Failure, message_of
from stoker.streaming import Restarted, StreamEvent, TextChunk
from stoker_shared.answer_parts import Cutter
from stoker_shared.result import Choice

Delta: TypeAlias = dict[str, Any]
"""Of a chat: fields that are added to the message. Of a text: the next piece of `text`."""


class Deltas:
    """Those of one choice."""

    def __init__(self, *, is_text: bool) -> None:
        self._is_text = is_text
        self._run = ""
        self._cutter: Cutter | None = None
        self._sent: dict[str, str] = {}

    def add(self, event: StreamEvent) -> list[Delta]:
        """What to send after this event; nothing while a restarted job catches up.

        Raises:
            Failure: the new text is another one.
        """
        if isinstance(event, Restarted):
            self._run, self._cutter = "", None
            return []
        self._run += event.text
        return self._news(self._parts_so_far(event), is_whole=False)

    def rest(self, choice: Choice) -> list[Delta]:
        """What is missing once the job has ended: thinking, text, and the calls, each whole.

        Raises:
            Failure: the answer does not begin with what was sent.
        """
        if self._is_text:
            return self._news({"text": choice.text}, is_whole=True) or ([] if self._sent else [{"text": ""}])
        message = message_of(choice)
        parts = {name: message.get(name) or "" for name in ("reasoning_content", "content")}
        deltas = [*self._beginning(), *self._news(parts, is_whole=True)]
        calls = enumerate(message.get("tool_calls") or ())
        return [*deltas, *({"tool_calls": [{"index": number, **call}]} for number, call in calls)]

    def _parts_so_far(self, chunk: TextChunk) -> dict[str, str]:
        if self._is_text:
            return {"text": self._run}
        if chunk.markers is None:
            return {}
        if self._cutter is None or self._cutter.markers != chunk.markers:
            self._cutter = Cutter(chunk.markers)
        parts = self._cutter.cut_so_far(self._run)
        return {"reasoning_content": parts.reasoning, "content": parts.content}

    def _news(self, parts: dict[str, str], *, is_whole: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for name, text in parts.items():
            sent = self._sent.get(name, "")
            if not text.startswith(sent) and (is_whole or not sent.startswith(text)):
                raise _another_text()
            if new := text[len(sent) :]:
                deltas += [*self._beginning(), {name: new}]
                self._sent[name] = text
        return deltas

    def _beginning(self) -> list[Delta]:
        """The first delta of a chat, once."""
        if self._is_text or self._sent:
            return []
        self._sent["content"] = ""
        return [{"role": "assistant", "content": ""}]


def _another_text() -> Failure:
    message = "the worker was lost, and the text that came again differs from what was sent; ask again"
    return Failure(500, message, kind="server_error", code="text_changed", retryable=True)
