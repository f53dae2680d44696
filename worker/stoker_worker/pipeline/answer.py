"""The answer in a generated text: what the model says, thinks and wants called. Pure; finisher threads."""

from dataclasses import dataclass
from typing import Any

from stoker_shared.answer_parts import cut
from stoker_shared.message import Message
from stoker_shared.request import GenerationRequest
from stoker_shared.result import FinishReason, ToolCall
from stoker_worker.pipeline.answer_calls import Calls
from stoker_worker.pipeline.parsed import parsed_answer
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import CompletedGeneration, LoadedModel
from stoker_worker.ports.answer_format import AnswerFormat
from stoker_worker.ports.own_message import OwnMessage


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        text: as generated.
        content: without thinking and without calls. White space at its end goes with them, and what they leave at its
            beginning.
        reasoning, tool_calls, tool_error, parsed: as in `stoker_shared.result.Choice`.
        reasoning_tokens: how many of the generated tokens are thinking, the markers not counted.
        opened: see `OwnMessage`.
    """

    text: str
    content: str
    finish_reason: FinishReason
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_error: str | None = None
    reasoning_tokens: int = 0
    opened: str = ""
    parsed: Any = None

    def fields(self) -> dict[str, Any]:
        """Those of a `Choice`, except its log-probabilities."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "answer": None if self.content == self.text else self.content,
            "reasoning": self.reasoning,
            "tool_calls": list(self.tool_calls) or None,
            "tool_error": self.tool_error,
            "parsed": self.parsed,
        }

    def message(self) -> Message:
        """The answer in the agent's transcript."""
        if self.content == self.text and not self.opened:
            return Message(role="assistant", content=self.text)
        calls = tuple(call.model_dump(mode="json") for call in self.tool_calls)
        return OwnMessage(
            role="assistant",
            content=self.content if self.content or not calls else None,
            reasoning_content=self.reasoning,
            tool_calls=calls or None,
            generated=self.text,
            opened=self.opened,
        )


def read_answer(
    request: GenerationRequest,
    prompt: Prompt,
    completion: CompletedGeneration,
    model: LoadedModel,
    id_seed: str,
) -> Answer:
    """
    Args:
        completion: of a sequence that finished.
        id_seed: the ids of calls are made from it; the same for each try of one delivery, another for each choice.
    """
    form = model.answer_format
    assert completion.ended_by is not None
    length = completion.ended_by == "length"
    calls = Calls(request.offered_tools, form, _used_ids(prompt), id_seed, is_cut_off=length)
    parts = cut(completion.text, prompt.markers, calls.take, form.tool_end)
    said = parts.said
    return Answer(
        text=completion.text,
        content=said if said == completion.text else parts.content,
        finish_reason="length" if length else "tool_calls" if calls.found else "stop",
        reasoning=parts.reasoning or None,
        tool_calls=tuple(calls.found),
        tool_error=parts.error,
        reasoning_tokens=_reasoning_tokens(completion, form, is_open=bool(prompt.opened), has_calls=bool(calls.found)),
        opened=prompt.opened,
        parsed=parsed_answer(request, completion, said),
    )


def _used_ids(prompt: Prompt) -> set[str]:
    return {str(call.get("id")) for message in prompt.messages or () for call in message.tool_calls or ()}


def _reasoning_tokens(completion: CompletedGeneration, form: AnswerFormat, *, is_open: bool, has_calls: bool) -> int:
    """Counted between the markers' token ids."""
    if not form.think_start_ids:
        return 0
    ids = completion.generated_ids[: completion.kept - (completion.ended_by == "eos")]
    total = at = 0
    while True:
        if not is_open:
            begin = _place(ids, form.think_start_ids, at)
            if begin is None:
                return total
            at = begin + len(form.think_start_ids)
        end = _place(ids, form.think_end_ids, at)
        if end is None:
            call = _place(ids, form.tool_start_ids, at) if has_calls and form.tool_start_ids else None
            return total + (len(ids) if call is None else call) - at
        total += end - at
        at, is_open = end + len(form.think_end_ids), False


def _place(ids: tuple[int, ...], wanted: tuple[int, ...], start: int) -> int | None:
    """The first index from `start` on at which `ids` has `wanted`."""
    places = range(start, len(ids) - len(wanted) + 1)
    return next((at for at in places if ids[at : at + len(wanted)] == wanted), None)
