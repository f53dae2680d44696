"""OpenAI's chat completions and completions: their fields, which docs/batches.md lists, their answers and events. Pure.

Things without a name at OpenAI have vLLM's: `reasoning_content` in a message, `prompt_logprobs` in the body. `task` and
`attempts` are stoker's own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from stoker.api.deltas import Delta, Deltas, content_of
from stoker.api.endpoint import ApiCall, Endpoint, EventWriter, event, own_fields, take_flag
from stoker.api.failure import Failure, FieldRefused
from stoker.api.fields import (
    BodyOptions,
    Rule,
    apply_rules,
    checked,
    copied,
    default_limit,
    ignored,
    limit,
    model_rule,
    only,
    reasoning_effort,
    session,
    template_kwargs,
)
from stoker_shared.message import Message
from stoker_shared.result import Choice, GenerationResult, Logprobs, TokenLogprob

CHAT_URL: Final = "/v1/chat/completions"
TEXT_URL: Final = "/v1/completions"
_OPENAI_TEMPERATURE: Final = 1.0


_OF_MESSAGES: Final = frozenset(Message.model_fields) | {
    *("annotations", "audio", "function_call", "parsed", "reasoning", "refusal"),
}


def _messages(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """Drops fields that other servers, or the clients themselves, have added to an answer that is sent back."""
    if isinstance(value, list):
        value = [
            {name: part for name, part in message.items() if name in _OF_MESSAGES}
            if isinstance(message, dict)
            else message
            for message in value
        ]
    fields["messages"] = value


def _metadata(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FieldRefused("metadata", "is not an object of strings", "invalid_value")
    if "agent_id" in value:
        fields["agent_id"] = value["agent_id"]


def _response_format(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if value != {"type": "text"}:
        fields["response_format"] = value


def _prompt(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """One prompt or several, each a text or token ids."""
    is_list = isinstance(value, list)
    prompts = value if is_list and value and isinstance(value[0], str | list) else [value]
    if len(prompts) > _MOST_PROMPTS:
        raise FieldRefused("prompt", f"has {len(prompts)} prompts, the limit is {_MOST_PROMPTS}", "invalid_value")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(id_) is int for id_ in prompt)):
            raise FieldRefused("prompt", "must be a text or token ids, or a list of these", "invalid_value")
    fields["prompts"] = [{"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt} for prompt in prompts]


def _echo(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if checked("echo", value, bool):
        fields["return_prompt"] = True


def _text_logprobs(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 5:
        raise FieldRefused("logprobs", "must be a whole number from 0 to 5", "invalid_value")
    fields["logprobs"], fields["top_logprobs"] = True, value


_COMMON: Final[dict[str, Rule]] = {
    "model": model_rule,
    **limit("max_tokens"),
    **session("user"),
    "metadata": _metadata,
    **copied("temperature", "top_p", "seed", "stop", "n", "frequency_penalty", "presence_penalty", "logit_bias"),
    # Not OpenAI's:
    **copied("context", "cache", "cache_salt", "expect_version", "must_exist", "task"),
    **copied("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "guide"),
    **copied("max_reasoning_tokens", "prompt_logprobs", "prompt_logprobs_start"),
}

_CHAT: Final[dict[str, Rule]] = {
    **_COMMON,
    **limit("max_completion_tokens"),
    "response_format": _response_format,
    "messages": _messages,
    **session("prompt_cache_key"),
    "reasoning_effort": reasoning_effort,
    "chat_template_kwargs": template_kwargs,
    **copied("logprobs", "top_logprobs"),
    **copied("tools", "tool_choice", "parallel_tool_calls"),
    **ignored("prediction", "verbosity", "prompt_cache_options", "prompt_cache_retention"),
    **ignored("safety_identifier", "service_tier"),
    **only("modalities", ["text"]),
    **only("audio"),
    **only("functions", []),
    **only("function_call"),
    **only("web_search_options"),
    **only("moderation"),
    **only("store", False),
}

_TEXT: Final[dict[str, Rule]] = {
    **_COMMON,
    "prompt": _prompt,
    "logprobs": _text_logprobs,
    **only("best_of", 1),
    "echo": _echo,
    **only("suffix"),
}

_MOST_PROMPTS: Final = 1024
_FINGERPRINT: Final = f"stoker-{version('stoker')}"
_ID_PREFIX: Final = {True: "cmpl", False: "chatcmpl"}


class Completions(Endpoint):
    """One of the two endpoints.

    Args:
        rules: by field name, without `stream` and `stream_options`.
        max_tokens: the limit of a body without one; ``None`` for what the context leaves.
    """

    def __init__(self, url: str, rules: Mapping[str, Rule], *, is_raw: bool, max_tokens: int | None) -> None:
        self.url = url
        self.is_raw = is_raw
        self.rules = rules
        self._max_tokens = max_tokens

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        is_streamed, stream_options = take_flag(body, "stream"), body.pop("stream_options", None)
        if stream_options is not None and (not is_streamed or not isinstance(stream_options, dict)):
            raise FieldRefused("stream_options", "must be an object, and needs 'stream': true", "invalid_value")
        if is_streamed and body.get("prompt_logprobs") is not None:
            raise FieldRefused("prompt_logprobs", "has no place in a stream: ask without 'stream'")
        fields: dict[str, Any] = {"temperature": _OPENAI_TEMPERATURE}
        apply_rules(self.rules, self.url, body, fields, options)
        if fields.get("tool_choice") == "none" and "tools" not in fields:
            del fields["tool_choice"]
        default_limit(fields, options, self._max_tokens)
        is_echoed = fields.get("return_prompt", False)
        if is_echoed and is_streamed:
            raise FieldRefused("echo", "has no place in a stream: ask without 'stream'")
        if is_echoed and fields.get("logprobs"):
            fields["prompt_logprobs"] = fields["top_logprobs"]
        prompts = fields.pop("prompts", [{}])
        if len(prompts) > 1 and "prompt_logprobs" in fields and not is_echoed:
            raise FieldRefused("prompt_logprobs", "has no place for several prompts: ask one by one, or with 'echo'")
        kept = {"with_usage": bool((stream_options or {}).get("include_usage"))}
        requests = tuple({**fields, **prompt} for prompt in prompts)
        return ApiCall(requests, str(body.get("model")), is_streamed, kept)

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        first = results[0]
        choices = [choice for result in results for choice in _choices_of(result)]
        body = {
            "id": f"{_ID_PREFIX[self.is_raw]}-{first.job_id}",
            "object": "text_completion" if self.is_raw else "chat.completion",
            "created": created_s,
            "model": first.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": [_choice(index, choice, is_raw=self.is_raw) for index, choice in enumerate(choices)],
            "usage": _usage_of(results),
            **own_fields(first),
        }
        if first.prompt_logprobs is not None and first.prompt is None:
            body["prompt_logprobs"] = first.prompt_logprobs.model_dump(mode="json")
        return body

    def events(self, job_id: str, call: ApiCall, created_s: int) -> "Chunks":
        return Chunks(job_id, call.model, created_s, is_raw=self.is_raw, with_usage=call.kept["with_usage"])


CHAT: Final = Completions(CHAT_URL, _CHAT, is_raw=False, max_tokens=None)

TEXT: Final = Completions(TEXT_URL, _TEXT, is_raw=True, max_tokens=16)


def _choices_of(result: GenerationResult) -> list[Choice]:
    """The choices, each with the prompt before it if asked for, and the prompt's scores before those of the answer."""
    choices: list[Choice] = list(result.choices or [result])
    if result.prompt is None:
        return choices
    before, prompt = result.prompt_logprobs, result.prompt.text
    scores = [] if before is None else before.content
    if scores and scores[0] is None:  # nothing predicts the first token
        rest = sum(len(entry.token) for entry in scores if entry is not None)
        scores = [TokenLogprob(token=prompt[: max(0, len(prompt) - rest)], logprob=math.nan), *scores[1:]]
    found = [entry for entry in scores if entry is not None]

    def echoed(choice: Choice) -> Choice:
        own = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = Logprobs(content=[*found, *own]) if found or own else None
        return choice.model_copy(update={"text": prompt + choice.text, "logprobs": logprobs})

    return list(map(echoed, choices))


def _usage_of(results: Sequence[GenerationResult]) -> dict[str, Any]:
    n_prompt, n_cached, n_completion, n_reasoning = (
        sum(getattr(result.usage, name) for result in results)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    )
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def _message_of(choice: Choice) -> dict[str, Any]:
    """The assistant's message; its `content` is ``None`` if the model only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": content_of(choice), "refusal": None}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [call.model_dump(mode="json") for call in choice.tool_calls]
    return message


def _logprobs_of(choice: Choice, *, is_raw: bool) -> dict[str, Any] | None:
    """Completions have an older form, by columns; a token's offset is the length of the text before it."""
    if choice.logprobs is None:
        return None
    entries = choice.logprobs.content
    if not is_raw:
        return {"content": [entry.model_dump(mode="json") for entry in entries], "refusal": None}
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [None if math.isnan(entry.logprob) else entry.logprob for entry in entries],
        "top_logprobs": [
            None if math.isnan(entry.logprob) else {top.token: top.logprob for top in entry.top_logprobs}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _choice(index: int, choice: Choice, *, is_raw: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": choice.text} if is_raw else {"message": _message_of(choice)}
    logprobs = _logprobs_of(choice, is_raw=is_raw)
    return {"index": index, **answer, "logprobs": logprobs, "finish_reason": choice.finish_reason}


_DONE: Final = b"data: [DONE]\n\n"


class Chunks(EventWriter):
    """
    Args:
        model: the name in the events.
        created_s: Unix seconds.
        with_usage: every event has `usage`, and one more at the end has the counts.
    """

    def __init__(self, job_id: str, model: str, created_s: int, *, is_raw: bool, with_usage: bool) -> None:
        self._is_raw = is_raw
        self._with_usage = with_usage
        self._begun: set[int] = set()
        self._frame = {
            "id": f"{_ID_PREFIX[is_raw]}-{job_id}",
            "object": "text_completion" if is_raw else "chat.completion.chunk",
            "created": created_s,
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }

    def more(self, delta: Delta, index: int = 0, *, logprobs: Any = None) -> Iterator[bytes]:
        yield from self._begin_choice(index)
        yield self._event(self._fields(delta), index, logprobs=logprobs)

    def end(self, results: Sequence[GenerationResult], first: Deltas) -> Iterator[bytes]:
        choices = [choice for result in results for choice in _choices_of(result)]
        for index, choice in enumerate(choices):
            deltas = first if index == 0 else Deltas(is_raw=self._is_raw)
            yield from self._rest(index, choice, deltas.rest(choice))
        for index, choice in enumerate(choices):
            yield self._event({"text": ""} if self._is_raw else {}, index, reason=choice.finish_reason)
        if self._with_usage:
            yield event({**self._frame, "choices": [], "usage": _usage_of(results)})
        yield _DONE

    def failed(self, failure: Failure) -> Iterator[bytes]:
        yield event(failure.body)

    def _rest(self, index: int, choice: Choice, deltas: list[Delta]) -> Iterator[bytes]:
        """The missing deltas of a choice; its log-probabilities, if there are any, are in an event of text."""
        logprobs = _logprobs_of(choice, is_raw=self._is_raw)
        is_empty = self._is_raw and not deltas and index not in self._begun
        if is_empty or (logprobs is not None and all(delta.kind != "text" for delta in deltas)):
            deltas = [*deltas, Delta("text")]
        yield from self._begin_choice(index)
        for delta in deltas:
            yield from self.more(delta, index, logprobs=logprobs if delta.kind == "text" else None)

    def _begin_choice(self, index: int) -> Iterator[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            if not self._is_raw:
                yield self._event({"role": "assistant", "content": ""}, index)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        if delta.call is not None:
            return {"tool_calls": [{"index": delta.number, **delta.call.model_dump(mode="json")}]}
        if self._is_raw:
            return {"text": delta.text}
        return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}

    def _event(self, fields: dict[str, Any], index: int, *, reason: str | None = None, logprobs: Any = None) -> bytes:
        """`reason`: why the answer ended, in the last event of a choice."""
        choice = {
            "index": index,
            **(fields if self._is_raw else {"delta": fields}),
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        usage = {"usage": None} if self._with_usage else {}
        return event({**self._frame, "choices": [choice], **usage})
