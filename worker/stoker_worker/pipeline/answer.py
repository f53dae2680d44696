"""Turns a generated text into the job's result: answer, thinking, tool calls, JSON value. No I/O; finisher threads.

Calls are parsed by another library, and the model may write anything: if a call cannot be read, the answer has the
reason instead.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic_core import to_jsonable_python

from stoker_shared.answer_parts import Markers, Parts, cut
from stoker_shared.message import MOST_TOOL_CALLS, Message
from stoker_shared.request import GenerationRequest
from stoker_shared.result import (
    CacheReport,
    CalledFunction,
    Choice,
    GenerationResult,
    ReturnedPrompt,
    Timing,
    ToolCall,
    Usage,
)
from stoker_shared.text import one_line
from stoker_worker.pipeline.job import Job
from stoker_worker.pipeline.prompt import Prompt, replaced_version
from stoker_worker.ports import CompletedGeneration, LoadedModel
from stoker_worker.ports.memory import OwnMessage
from stoker_worker.ports.model import AnswerFormat, ToolParser


@dataclass(frozen=True)
class Answer:
    """A choice of the result, and what its job's usage and transcript need besides.

    Attributes:
        reasoning_tokens: how many of the generated tokens are thinking, the markers not counted.
        opened: as in `OwnMessage`.
    """

    choice: Choice
    reasoning_tokens: int
    opened: str

    def message(self) -> Message:
        """The answer as a message of the agent's transcript."""
        text, answer, calls = self.choice.text, self.choice.answer, self.choice.tool_calls
        if answer is None and not self.opened:
            return Message(role="assistant", content=text)
        content = text if answer is None else answer
        return OwnMessage(
            role="assistant",
            content=content if content or not calls else None,
            reasoning_content=self.choice.reasoning,
            tool_calls=tuple(call.model_dump(mode="json") for call in calls) if calls else None,
            generated=text,
            opened=self.opened,
        )


def read_answer(
    request: GenerationRequest,
    prompt: Prompt,
    completion: CompletedGeneration,
    model: LoadedModel,
    id_seed: str,
) -> Answer:
    """The answer of one finished sequence. `id_seed`: the ids of calls are made from it; the same for each try of one
    delivery, another for each choice."""
    form = model.answer_format
    assert completion.ended_by is not None
    length = completion.ended_by == "length"
    calls = Calls(request.offered_tools, form, _used_ids(prompt), id_seed, is_cut_off=length)
    parts = calls.cut(completion.text, prompt.markers)
    said = parts.said
    found = calls.found if request.parallel_tool_calls else calls.found[:1]
    choice = Choice(
        text=completion.text,
        finish_reason="length" if length else "tool_calls" if found else "stop",
        answer=None if completion.text in (said, parts.content) else parts.content,
        reasoning=parts.reasoning or None,
        tool_calls=found or None,
        tool_error=parts.error,
        parsed=parsed_answer(request, completion, said),
        stop_string=completion.stop_string,
        logprobs=completion.logprobs,
    )
    n_reasoning = _reasoning_tokens(completion, form, is_open=bool(prompt.opened), has_calls=bool(found))
    return Answer(choice, n_reasoning, prompt.opened)


def _used_ids(prompt: Prompt) -> set[str]:
    return {str(call.get("id")) for message in prompt.messages or () for call in message.tool_calls or ()}


def _reasoning_tokens(completion: CompletedGeneration, form: AnswerFormat, *, is_open: bool, has_calls: bool) -> int:
    """How many generated tokens are between the token ids of the thinking markers."""
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


_ID_LETTERS: Final = 9
"""Templates of Mistral's want nine letters or digits."""

_MOST_ID_LETTERS: Final = 64

_MOST_LEVELS: Final = 100
"""Levels of objects and lists in a call's arguments. At some 400, no template can render the conversation any more."""


class Calls:
    """Reads the tool calls of one answer. `found`: those read, in the order of the answer."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        form: AnswerFormat,
        used_ids: Collection[str],
        seed: str,
        *,
        is_cut_off: bool,
    ) -> None:
        """
        Args:
            used_ids: of the calls earlier in the conversation.
            seed: new ids are made from it.
            is_cut_off: whether `max_tokens` ended the answer.
        """
        self._tools = _as_parsers_take(tools)
        self._names = {tool["function"]["name"] for tool in self._tools}
        self._form = form
        self._ids = set(used_ids)
        self._seed = seed
        self._is_cut_off = is_cut_off
        self.found: list[ToolCall] = []

    def cut(self, text: str, markers: Markers) -> Parts:
        """The parts of the answer; each of its calls is read."""
        if not markers.is_call:
            return cut(text, markers, self._take, self._form.tool_end)
        parts = cut(text, markers, self._take_whole, None)
        if self.found:
            return parts
        anything = cut(text, self._form.markers(markers.first, with_calls=True), self._take, self._form.tool_end)
        return replace(anything, error=anything.error or parts.error)

    def _take_whole(self, text: str, is_closed: bool) -> str | None:
        """Read a text that is one call, with its markers, or as the JSON object ``{"name": ..., "arguments": ...}``."""
        text, start, end = text.strip(), self._form.tool_start, self._form.tool_end or ""
        if start and text.startswith(start):
            return self._take(text.removeprefix(start).removesuffix(end), text.endswith(end))
        return self._take(text, text.endswith("}"), _read_plain)

    def _take(self, text: str, is_closed: bool, parse: ToolParser | None = None) -> str | None:
        """Read the text between a call's markers; returns why it is no call. `is_closed`: it has the closing marker."""
        if not is_closed and self._is_cut_off:
            return "the call is cut off by max_tokens"
        parse = parse or self._form.parse_call
        assert parse is not None
        try:
            parsed = parse(text, self._tools)
            read = [_read(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception as error:  # a parser of another library, on whatever the model wrote
            return one_line(error)
        if not read:
            return "there is no call between the markers"
        if len(self.found) + len(read) > MOST_TOOL_CALLS:
            return f"a message has at most {MOST_TOOL_CALLS} calls"
        if not is_closed and any(name not in self._names for name, _, _ in read):
            return "the call has no end, and names none of the tools"
        for name, arguments, own_id in read:
            function = CalledFunction(name=name, arguments=arguments)
            self.found.append(ToolCall(id=self._id(own_id), function=function))
        return None

    def _id(self, own: str | None) -> str:
        """The model's own id if it is new, else one that the same delivery gets again."""
        count = len(self._ids)
        while own is None or own in self._ids:
            own = hashlib.sha256(f"{self._seed} {count}".encode()).hexdigest()[:_ID_LETTERS]
            count += 1
        self._ids.add(own)
        return own


def _read_plain(text: str, tools: Sequence[Mapping[str, Any]] | None) -> Any:
    return json.loads(text)


def _as_parsers_take(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the one form that every parser reads: some raise for a tool without parameters, for a schema that is
    ``true``, or for a tool that is no function."""
    taken = []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
            continue
        given = function.get("parameters")
        parameters = given if isinstance(given, Mapping) else {}
        declared = parameters.get("properties")
        properties = declared.items() if isinstance(declared, Mapping) else ()
        schemas = {key: schema for key, schema in properties if isinstance(schema, Mapping)}
        taken.append(
            {"type": "function", "function": {"name": name, "parameters": {**parameters, "properties": schemas}}}
        )
    return taken


def _read(call: Any) -> tuple[str, str, str | None]:
    """A call's name, its arguments as the JSON text of an object, and the id that the model gave it.

    Raises:
        ValueError: it is no call.
        TypeError: an argument is not JSON.
    """
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError("a call is an object with 'name' and 'arguments'")
    name.encode()  # a lone surrogate raises ValueError
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    if _is_deeper(arguments, _MOST_LEVELS):
        raise ValueError(f"the arguments of the call are nested more than {_MOST_LEVELS} levels deep")
    arguments = _in_range(arguments)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= letter <= "\udfff" for letter in written):
        written = json.dumps(arguments, allow_nan=False)
    return name, written, own_id if _is_id(own_id := call.get("id")) else None


def _in_range(value: Any) -> Any:
    """The value, with infinite numbers replaced by the largest double: a grammar lets 1e999 pass."""
    if isinstance(value, dict):
        return {name: _in_range(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_in_range(item) for item in value]
    return math.copysign(sys.float_info.max, value) if isinstance(value, float) and math.isinf(value) else value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(item, levels - 1) for item in inner)


def _is_id(own: Any) -> bool:
    return isinstance(own, str) and 0 < len(own) <= _MOST_ID_LETTERS and own.isprintable()


def parsed_answer(request: GenerationRequest, completion: CompletedGeneration, content: str) -> Any:
    """The JSON value of `content`, the text without thinking; ``None`` if no JSON was asked for, if `max_tokens` or a
    stop string has cut the answer off, or if no result can have the value."""
    if not request.is_formed or completion.ended_by != "eos":
        return None
    try:
        value = json.loads(content, parse_constant=_refuse, parse_float=lambda digits: _in_range(float(digits)))
        return to_jsonable_python(value)
    except (ValueError, RecursionError):  # it nests too deeply, or a key has half of a surrogate pair
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def build_result(
    job: Job, completion: CompletedGeneration, answers: Sequence[Answer], model: LoadedModel, cache: CacheReport
) -> GenerationResult:
    """The result as of now: `total_s` counts up to this call. `answers` has one for each choice."""
    completions = (completion, *job.further_choices)
    choices = [answer.choice for answer in answers]
    claimed, request, timing = job.claimed, job.request, completion.timing
    first_token_at = job.submitted_at + timing.waited_s + timing.prefill_s
    return GenerationResult(
        job_id=claimed.job_id,
        agent_id=request.agent_id,
        **dict(choices[0]),
        usage=Usage(
            prompt_tokens=len(job.prompt.ids),
            cached_tokens=completion.cached_tokens,
            completion_tokens=sum(len(one.generated_ids) for one in completions),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in answers),
        ),
        cache=cache,
        timing=Timing(
            queued_s=_seconds(claimed.claimed_at - claimed.enqueued_at),
            prefill_s=_seconds(timing.prefill_s),
            first_token_s=_seconds(first_token_at - claimed.enqueued_at),
            decode_s=_seconds(max(_ended_after_s(one) for one in completions) - timing.waited_s - timing.prefill_s),
            total_s=_seconds(time.time() - claimed.enqueued_at),
        ),
        model=model.name,
        attempt=claimed.attempt,
        prompt=ReturnedPrompt(text=job.prompt.decoded, token_ids=[*job.prompt.ids]) if request.return_prompt else None,
        prompt_logprobs=completion.prompt_logprobs,
        choices=choices if request.n > 1 else None,
        metadata=request.metadata,
    )


def _ended_after_s(completion: CompletedGeneration) -> float:
    """Seconds from its submission to the engine."""
    timing = completion.timing
    return timing.waited_s + timing.prefill_s + timing.decode_s


def with_total_until_now(result: Mapping[str, Any], job: Job) -> Mapping[str, Any]:
    """The result (as JSON) with a `total_s` that includes the save, before which the stored copy was built."""
    return {**result, "timing": {**result["timing"], "total_s": _seconds(time.time() - job.claimed.enqueued_at)}}


def cache_report(
    job: Job,
    completion: CompletedGeneration,
    *,
    agent_version: int | None,
    saved: bool,
    save_error: str | None = None,
) -> CacheReport:
    """`saved`: the turn is the agent's `agent_version`; then it may have replaced another conversation."""
    restored, agent = job.restored, job.agent
    # A restored prefix is lost when a step breaks: the sequence then begins again from its tokens.
    is_lost = restored.source != "none" and completion.cached_tokens == 0
    from_the_batch = restored.source == "none" and completion.cached_tokens > 0
    return CacheReport(
        source="none" if is_lost else "memory" if from_the_batch else restored.source,
        miss_reason=job.prompt.rendered_anew or ("step_broke" if is_lost else restored.miss_reason),
        agent_version=agent_version,
        saved=saved,
        save_error=save_error,
        replaced_version=replaced_version(job.prompt, agent) if saved and agent is not None else None,
    )


def _seconds(value: float) -> float:
    # The producer's clock may be ahead of this machine's: a job must not have waited a negative time.
    return round(max(0.0, value), 6)


def read_answers(job: Job, completion: CompletedGeneration, model: LoadedModel) -> list[Answer]:
    """One answer for each choice."""
    seed = repr(job.claimed.delivery)
    return [
        read_answer(job.request, job.prompt, one, model, f"{seed} {number}" if number else seed)
        for number, one in enumerate((completion, *job.further_choices))
    ]
