"""The events of a streamed answer, in OpenAI's form. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from stoker.openai.answers import ID_PREFIX, chat_logprobs, choices_of, text_logprobs, usage_of
from stoker.serve.deltas import Delta, Deltas
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
