"""The events of a streamed answer, in OpenAI's form: what is certain as it is generated, then the rest. Pure.

`Deltas` owns what was sent. It cannot be taken back: whatever comes later, of the same run of the job, of another one,
or as its result, must continue it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from stoker.openai.answers import ID_PREFIX, Failure, chat_logprobs, choices_of, message_of, text_logprobs, usage_of
from stoker.streaming import Restarted, StreamEvent, TextChunk
from stoker_shared.answer_parts import Cutter
from stoker_shared.result import Choice, GenerationResult

Delta: TypeAlias = dict[str, Any]
"""For a chat, fields that are added to the message; for a text completion, the next piece of `text`."""


class Deltas:
    """The deltas of one choice."""

    def __init__(self, *, is_text: bool) -> None:
        self._is_text = is_text
        self._run = ""
        self._cutter: Cutter | None = None
        self._sent: dict[str, str] = {}

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


DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Chunks:
    """
    Attributes:
        model: the name that the events have.
        created_s: Unix seconds.
        with_usage: every event has `usage`, and a last one has the counts.
    """

    job_id: str
    model: str
    created_s: int
    is_text: bool
    with_usage: bool

    def more(self, delta: Delta, index: int = 0, *, reason: str | None = None, logprobs: Any = None) -> bytes:
        """The event of a delta.

        Args:
            reason: why the answer ended, in the last event of a choice.
        """
        said = delta if self.is_text else {"delta": delta}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.with_usage else {}
        return event({**self._frame(), "choices": [choice], **usage})

    def rest(self, result: GenerationResult, first: Deltas) -> Iterator[bytes]:
        """The events from the job's end on.

        Args:
            first: the deltas of the first choice, of which some may have been sent; of the others none was.

        Raises:
            Failure: as `Deltas.rest`.
        """
        choices = choices_of(result)
        for index, choice in enumerate(choices):
            deltas = first if index == 0 else Deltas(is_text=self.is_text)
            yield from self._rest(index, choice, deltas.rest(choice))
        for index, choice in enumerate(choices):
            yield self.more({"text": ""} if self.is_text else {}, index, reason=choice.finish_reason)
        if self.with_usage:
            yield event({**self._frame(), "choices": [], "usage": usage_of(result)})
        yield DONE

    def _rest(self, index: int, choice: Choice, deltas: list[Delta]) -> Iterator[bytes]:
        """With the log-probabilities, if there are any, in an event of text."""
        name = "text" if self.is_text else "content"
        logprobs = text_logprobs(choice.logprobs) if self.is_text else chat_logprobs(choice.logprobs)
        if logprobs is not None and not any(delta.keys() == {name} for delta in deltas):
            deltas = [*deltas, {name: ""}]
        for delta in deltas:
            yield self.more(delta, index, logprobs=logprobs if delta.keys() == {name} else None)

    def _frame(self) -> dict[str, Any]:
        return {
            "id": f"{ID_PREFIX[self.is_text]}-{self.job_id}",
            "object": "text_completion" if self.is_text else "chat.completion.chunk",
            "created": self.created_s,
            "model": self.model,
        }


def event(value: dict[str, Any]) -> bytes:
    """One event. In ASCII: many clients take a line separator such as U+2028, unescaped, for the end of a line."""
    return f"data: {json.dumps(value)}\n\n".encode()
