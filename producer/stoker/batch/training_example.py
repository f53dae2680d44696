"""What an answered line teaches: one example in the chat form that `mlx_lm.lora` reads, or why there is none. Pure.

Examples are split by a hash of their prompt, so an example is in the same part in every export, whatever else is in
the batch. Prompts that differ in white space and case only have the same hash: none is trained on and held out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from stoker.batch.lines import Line
from stoker.openai.fields import CHAT_URL
from stoker_shared.message import Message
from stoker_shared.task_class import task_of

Part = Literal["train", "valid", "test"]
PARTS: Final[tuple[Part, ...]] = ("train", "valid", "test")

_COMPLETE: Final = frozenset({"stop", "tool_calls"})
_KEY_BITS: Final = 64


class NoExample(Exception):
    """An answered line that teaches nothing. The message is the reason, in words that a count can precede."""


@dataclass(frozen=True)
class TrainingExample:
    """
    Attributes:
        model: the model that gave the answer.
        task: the class under which verdicts on the answer count.
        row: the object that `mlx_lm.lora` reads.
        prompt_key: equal for prompts that differ in white space and case only; of 64 bits, as `split_key` is.
        split_key: decides in which part the example is; equal for all turns of an agent's conversation, because each
            turn repeats the answers before it.
    """

    model: str
    task: str
    row: Mapping[str, Any]
    prompt_key: int
    split_key: int

    def part(self, held_out: float) -> Part:
        """
        Args:
            held_out: the share that is not trained on, from 0 to 1; half of it is ``valid``, half ``test``. A larger
                share only takes examples from ``train``.
        """
        place = self.split_key / 2**_KEY_BITS
        if place < held_out / 2:
            return "valid"
        return "test" if place >= 1 - held_out / 2 else "train"


def example_of(line: Line, body: Mapping[str, Any]) -> TrainingExample:
    """
    Args:
        body: the body of the response to `line`, which succeeded.

    Raises:
        NoExample: the answer was not accepted, or the line does not hold its whole prompt as a chat.
    """
    request = line.request
    if line.url != CHAT_URL or request.messages is None:
        raise NoExample("not a chat")
    if request.context == "append":
        raise NoExample("continuing a stored conversation")
    choice = body["choices"][0]
    _require_accepted(body, choice)
    answered = Message.model_validate(choice["message"])
    row: dict[str, Any] = {"messages": [_as_taught(message) for message in (*request.messages, answered)]}
    if request.offered_tools:
        row["tools"] = list(request.offered_tools)
    opening = request.messages if request.agent_id is None else _opening(request.messages)
    task = body.get("task") or task_of(request)
    return TrainingExample(body["model"], task, row, _key(request.messages), _key(opening))


def _require_accepted(body: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    """A check decides; without one, every answer is accepted that was not cut off."""
    attempts = body.get("attempts")
    if attempts and not attempts[-1]["accepted"]:
        raise NoExample("rejected by a check")
    if not attempts and choice["finish_reason"] not in _COMPLETE:
        raise NoExample("cut off")


def _as_taught(message: Message) -> dict[str, Any]:
    """The message in the form that most chat templates render as they should, with the arguments of calls as objects.
    mlx-lm's trainer, unlike the worker, does not adapt messages to the template."""
    fields = {"content": "", **message.as_template_input()}
    if message.role == "developer":
        fields["role"] = "system"
    if message.tool_calls:
        fields["tool_calls"] = [_with_object(call) for call in message.tool_calls]
    return fields


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _opening(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages up to the first one of the user: the part that all turns of a conversation share."""
    first = next((n for n, message in enumerate(messages) if message.role == "user"), len(messages))
    return messages[: first + 1]


def _key(messages: Sequence[Message]) -> int:
    said = [
        # A call's id is random.
        [message.role, _plain(message.content or ""), [call.get("function") for call in message.tool_calls or ()]]
        for message in messages
    ]
    text = json.dumps(said, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_KEY_BITS // 8).digest())


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
