"""The events of a streamed answer, in OpenAI's form. Pure.

An answer whose parts are known only at its end (tool calls, thinking, several choices, log-probabilities) has one event
for each part.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from stoker.openai.answers import ID_PREFIX, chat_logprobs, choices_of, message_of, text_logprobs, usage_of
from stoker.openai.failures import Failure
from stoker.streaming import Restarted, StreamEvent
from stoker_shared.result import Choice, GenerationResult

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

    def begin(self, index: int = 0) -> bytes:
        """The first event of a choice."""
        if self.is_text:
            return self._text(index, "")
        return self._chat(index, {"role": "assistant", "content": ""})

    def more(self, text: str, index: int = 0) -> bytes:
        """The next piece of the text."""
        return self._text(index, text) if self.is_text else self._chat(index, {"content": text})

    def whole(self, result: GenerationResult) -> Iterator[bytes]:
        """All events of an answer of which nothing was sent, but for `end`."""
        for index, choice in enumerate(choices_of(result)):
            if self.is_text:
                yield self._text(index, choice.text, logprobs=text_logprobs(choice.logprobs))
                continue
            yield self.begin(index)
            yield from self._parts(index, choice)

    def end(self, result: GenerationResult) -> Iterator[bytes]:
        """The last events, with the reasons for the ends and the counts."""
        for index, choice in enumerate(choices_of(result)):
            if self.is_text:
                yield self._text(index, "", choice.finish_reason)
            else:
                yield self._chat(index, {}, choice.finish_reason)
        if self.with_usage:
            yield event({**self._frame(), "choices": [], "usage": usage_of(result)})
        yield DONE

    def _parts(self, index: int, choice: Choice) -> Iterator[bytes]:
        message = message_of(choice)
        if reasoning := message.get("reasoning_content"):
            yield self._chat(index, {"reasoning_content": reasoning})
        if message["content"] or choice.logprobs is not None:
            yield self._chat(index, {"content": message["content"] or ""}, logprobs=chat_logprobs(choice.logprobs))
        for number, tool_call in enumerate(message.get("tool_calls") or ()):
            yield self._chat(index, {"tool_calls": [{"index": number, **tool_call}]})

    def _chat(self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        return self._choice({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _text(self, index: int, text: str, reason: str | None = None, logprobs: Any = None) -> bytes:
        return self._choice({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})

    def _choice(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.with_usage else {}
        return event({**self._frame(), "choices": [choice], **usage})

    def _frame(self) -> dict[str, Any]:
        return {
            "id": f"{ID_PREFIX[self.is_text]}-{self.job_id}",
            "object": "text_completion" if self.is_text else "chat.completion.chunk",
            "created": self.created_s,
            "model": self.model,
        }


class SentText:
    """The text that a client has got. It cannot be taken back: after a restart, the new text must continue it."""

    def __init__(self) -> None:
        self._sent = ""
        self._run = ""
        self._is_behind = False

    def add(self, event: StreamEvent) -> str:
        """The text to send after this event; often empty while a restarted job catches up.

        Raises:
            Failure: the new text is another one.
        """
        if isinstance(event, Restarted):
            self._run, self._is_behind = "", True
            return ""
        self._run += event.text
        if not self._is_behind:
            self._sent = self._run
            return event.text
        if self._sent.startswith(self._run):
            return ""
        if not self._run.startswith(self._sent):
            raise _another_text()
        new = self._run[len(self._sent) :]
        self._sent, self._is_behind = self._run, False
        return new

    def require_all(self) -> None:
        """
        Raises:
            Failure: the job has ended, and its text is shorter than what was sent.
        """
        if self._run != self._sent:
            raise _another_text()


def event(value: dict[str, Any]) -> bytes:
    """One event. In ASCII: many clients take a line separator such as U+2028, unescaped, for the end of a line."""
    return f"data: {json.dumps(value)}\n\n".encode()


def _another_text() -> Failure:
    message = "the worker was lost, and the text that came again differs from what was sent; ask again"
    return Failure(500, message, kind="server_error", code="text_changed", retryable=True)
