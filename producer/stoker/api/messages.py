"""Anthropic's Messages and its count of tokens: their fields, which docs/serve.md lists, answers, events and errors.
Pure.

A conversation is changed so that every chat template accepts it: the system text comes first, then alternating turns,
and tool results in messages of their own.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from stoker.api.deltas import Delta, Deltas, content_of
from stoker.api.endpoint import ApiCall, Endpoint, EventWriter, event, take_flag
from stoker.api.failure import TOO_LONG, Failure, FieldRefused
from stoker.api.fields import (
    BodyOptions,
    Rule,
    apply_rules,
    checked,
    copied,
    for_template,
    ignored,
    model_rule,
    only,
    session_name,
    template_kwargs,
)
from stoker_shared.result import Choice, GenerationResult, ToolCall

MESSAGES_URL: Final = "/v1/messages"
COUNT_URL: Final = "/v1/messages/count_tokens"

_TEMPERATURE: Final = 1.0
_BETWEEN_TEXTS: Final = "\n\n"
_BILLING: Final = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's system text that differs in each call, and means nothing to a model."""

_SIGNATURE: Final = "c3Rva2Vy"
"""Clients keep a thinking block with its signature, or not at all. Nothing checks this one."""

_REMINDER: Final = "<system-reminder>"
_SHOWN: Final = 64


def _refused(field: str, why: str) -> FieldRefused:
    return FieldRefused(field, why, "invalid_value")


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(text := fields.get(name), str):
        raise _refused(where, f"needs '{name}', a string")
    return text


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """The blocks of a content, with a `type` each; a string is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = [checked(where, block, dict) for block in checked(where, content, list)]
    for block in blocks:
        _text(block, "type", where)
    return blocks


def _not_served(kind: str, where: str) -> FieldRefused:
    return FieldRefused(where, f"has a block of type {kind[:_SHOWN]!r}, which is not served here")


def _texts(content: Any, where: str) -> list[str]:
    """Raises `FieldRefused`: a block is not text."""
    blocks = _blocks(content, where)
    for block in blocks:
        if block["type"] != "text":
            raise _not_served(block["type"], where)
    return [_text(block, "text", where) for block in blocks]


Turn = tuple[str, list[dict[str, Any]]]
"""A role, and the blocks of its messages."""


def _conversation(system: Any, messages: Any) -> list[dict[str, Any]]:
    """The messages of a `GenerationRequest`. Raises `FieldRefused`: a block or a role is not served."""
    opening = [] if system is None else _texts(system, "system")
    turns: list[Turn] = []
    for number, message in enumerate(checked("messages", messages, list)):
        where = f"messages.{number}"
        role, content = _text(checked(where, message, dict), "role", where), message.get("content")
        if role == "system" and not turns:
            opening += _texts(content, where)
        elif role == "system":
            _remind(turns, _texts(content, where))
        elif role in ("user", "assistant"):
            _add(turns, role, _blocks(content, where))
        else:
            raise _refused(where, "must be of the role 'user', 'assistant' or 'system'")
    if not turns:
        raise _refused("messages", "must hold at least one message")
    said = _BETWEEN_TEXTS.join(text for text in opening if not text.startswith(_BILLING))
    found = [{"role": "system", "content": said}] if said else []
    for role, blocks in turns:
        found += [_assistant(blocks)] if role == "assistant" else _user(blocks)
    return found


def _add(turns: list[Turn], role: str, blocks: list[dict[str, Any]]) -> None:
    """Many templates refuse two messages of one role in a row."""
    if turns and turns[-1][0] == role:
        turns[-1][1].extend(blocks)
    else:
        turns.append((role, [*blocks]))


def _remind(turns: list[Turn], texts: Sequence[str]) -> None:
    """Put system texts, which most templates refuse between turns, into the user's turn, in the form of Claude Code's
    own reminders. They come before the user's last text, which the model answers."""
    reminders = [{"type": "text", "text": f"{_REMINDER}\n{text}\n</system-reminder>"} for text in texts]
    _add(turns, "user", [])
    blocks = turns[-1][1]
    is_said = bool(blocks) and blocks[-1]["type"] == "text" and not str(blocks[-1].get("text")).startswith(_REMINDER)
    at = len(blocks) - 1 if is_said else len(blocks)
    blocks[at:at] = reminders


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(_text(block, "text", "messages"))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", "messages"))
        elif kind == "tool_use":
            name, call_id = _text(block, "name", "messages"), _text(block, "id", "messages")
            arguments = json.dumps(checked("messages", block.get("input"), dict), ensure_ascii=False)
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        elif kind != "redacted_thinking":
            raise _not_served(kind, "messages")
    text = "".join(texts)  # an answer is one text, even if it was sent in pieces
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tool results, each in a message of its own, then the texts in one."""
    results, texts = [], []
    for block in blocks:
        if block["type"] == "text":
            texts.append(_text(block, "text", "messages"))
        elif block["type"] == "tool_result":
            results.append(_tool_result(block))
        else:
            raise _not_served(block["type"], "messages")
    if texts or not results:
        return [*results, {"role": "user", "content": _BETWEEN_TEXTS.join(texts)}]
    return results


def _tool_result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _BETWEEN_TEXTS.join(_texts(content, "messages"))
    if block.get("is_error") is True and not text.startswith("Error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", "messages"), "content": text}


def _tools(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    tools = []
    for number, tool in enumerate(checked("tools", value, list)):
        where = f"tools.{number}"
        given = {"type": "custom"} | {key: part for key, part in checked(where, tool, dict).items() if part is not None}
        kind = _text(given, "type", where)
        if kind.startswith("tool_search_tool_"):
            continue  # it finds tools that are not in the prompt, but here all are
        if kind != "custom":
            why = f"is of type {kind[:_SHOWN]!r}, which is not served: only tools with an 'input_schema' are"
            raise FieldRefused(where, why)
        function = {"name": _text(given, "name", where)}
        if "description" in given:
            function["description"] = _text(given, "description", where)
        schema = checked(f"{where}.input_schema", given.get("input_schema"), dict)
        tools.append({"type": "function", "function": {**function, "parameters": schema}})
    if tools:
        fields["tools"] = tools


_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def _tool_choice(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    choice = checked("tool_choice", value, dict)
    kind = _text(choice, "type", "tool_choice")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}
    elif kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise _refused("tool_choice", "must be of type 'auto', 'any', 'tool' or 'none'")
    if choice.get("disable_parallel_tool_use") is True:
        fields["parallel_tool_calls"] = False


def _thinking(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    kind = _text(checked("thinking", value, dict), "type", "thinking")
    if kind not in ("adaptive", "enabled", "disabled"):
        raise _refused("thinking", "must be of type 'adaptive', 'enabled' or 'disabled'")
    if kind == "enabled":
        budget = value.get("budget_tokens")
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
            raise _refused("thinking", "needs 'budget_tokens', a whole number")
        fields["max_reasoning_tokens"] = budget
    if kind != "adaptive":
        for_template(fields, enable_thinking=kind == "enabled")


_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Templates that know an effort know three levels."""


def _output_config(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    for name, chosen in checked("output_config", value, dict).items():
        if name == "effort" and isinstance(chosen, str | None) and (chosen is None or chosen in _EFFORTS):
            if chosen is not None:
                for_template(fields, reasoning_effort=_EFFORTS[chosen])
        elif name == "format":
            _format(fields, chosen, options)
        else:
            raise FieldRefused("output_config", f"has {name[:_SHOWN]!r} with a value that is not served")


def _format(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if value is None:
        return
    if _text(checked("output_config", value, dict), "type", "output_config") != "json_schema":
        raise FieldRefused("output_config", "has a 'format' that is not served: only type 'json_schema' is")
    schema = checked("output_config.format.schema", value.get("schema"), dict)
    fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _context_management(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """The model's template decides which thinking of earlier turns stays; nothing else is removed from a context."""
    edits = checked("context_management", value, dict).get("edits") or []
    for edit in checked("context_management", edits, list):
        kind = _text(checked("context_management", edit, dict), "type", "context_management")
        if not kind.startswith("clear_thinking_"):
            raise FieldRefused("context_management", f"has an edit of type {kind[:_SHOWN]!r}, which is not served")


def _metadata(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """Clients put a session into the user's id: as JSON, behind a name, or alone. It is a hint, and never refused."""
    given = checked("metadata", value, dict).get("user_id")
    if not isinstance(given, str):
        return
    with suppress(ValueError, RecursionError):
        parsed = json.loads(given)
        given = parsed.get("session_id") if isinstance(parsed, dict) else given
    if isinstance(given, str) and given:
        fields["session"] = session_name(given.rpartition("_session_")[2] or given)


def _thread(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """Refuses a thread, so that Anthropic's package continues without one and sends the whole conversation."""
    refused = FieldRefused("thread", "is not served")
    refused.error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    raise refused


_RULES: Final[dict[str, Rule]] = {
    "model": model_rule,
    "metadata": _metadata,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": _output_config,
    "output_format": _format,
    "context_management": _context_management,
    "chat_template_kwargs": template_kwargs,
    "stop_sequences": lambda fields, value, options: fields.update(stop=value),
    **copied("max_tokens", "temperature", "top_p", "top_k"),
    **ignored("cache_control", "service_tier", "inference_geo", "speed", "betas", "diagnostics"),
    **ignored("user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token", "fallbacks"),
    **only("container"),
    **only("mcp_servers", []),
    **only("compaction"),
    "thread": _thread,
    # Not Anthropic's:
    **copied("context", "cache", "cache_salt", "expect_version", "must_exist", "task"),
    **copied("seed", "min_p", "repetition_penalty"),
}

_OF_THE_PROMPT: Final = (
    *("model", "messages", "tools", "chat_template_kwargs"),
    *("context", "expect_version", "must_exist", "cache_salt"),
)
"""The fields on which a count depends, without `tool_choice`."""


def _fields_of(body: dict[str, Any], url: str, options: BodyOptions) -> dict[str, Any]:
    system, messages = body.pop("system", None), body.pop("messages", None)
    fields: dict[str, Any] = {"temperature": _TEMPERATURE, "messages": _conversation(system, messages)}
    apply_rules(_RULES, url, body, fields, options)
    if body.get("thinking") is None:  # Anthropic's default
        for_template(fields, enable_thinking=False)
    if fields.get("tool_choice") == "none" and "tools" not in fields:
        del fields["tool_choice"]
    return fields


class Messages(Endpoint):
    url = MESSAGES_URL
    is_raw = False
    rules: Mapping[str, Rule] = _RULES

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        is_streamed = take_flag(body, "stream")
        fields = _fields_of(body, self.url, options)
        if fields["messages"][-1]["role"] == "assistant":
            raise FieldRefused("messages", "ends with an assistant message: prefilling an answer is not supported")
        if "max_tokens" not in fields:
            raise FieldRefused("max_tokens", "is missing", "missing_required_parameter")
        fields["fit_max_tokens"] = True  # Claude Code asks for 32,000 with each call
        return ApiCall((fields,), str(body.get("model")), is_streamed)

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        result = results[0]
        return {
            **_frame(result.job_id, result.model),
            "content": _content(result),
            **_stop(result),
            "usage": _usage(result),
        }

    def events(self, job_id: str, call: ApiCall, created_s: int) -> "Events":
        return Events(job_id, call.model)

    def failure(self, failure: Failure) -> dict[str, Any]:
        return _error_body(failure)


class TokenCount(Messages):
    """A count is a job that generates nothing."""

    url = COUNT_URL

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        fields = _fields_of(body, self.url, options)
        kept = {name: value for name, value in fields.items() if name in _OF_THE_PROMPT}
        if fields.get("tool_choice") == "none":
            kept["tool_choice"] = "none"
        return ApiCall(({**kept, "max_tokens": 0, "cache": "read"},), str(body.get("model")))

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_tokens": results[0].usage.prompt_tokens}


MESSAGES: Final = Messages()
TOKEN_COUNT: Final = TokenCount()

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _stop(choice: Choice) -> dict[str, Any]:
    is_by_string = choice.stop_string is not None and choice.finish_reason == "stop"
    reason = "stop_sequence" if is_by_string else _STOP_REASONS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": choice.stop_string}


def _frame(job_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{job_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(result: GenerationResult | None) -> dict[str, Any]:
    """Zeros while there is no result."""
    usage = result.usage if result is not None else None
    n_cached = usage.cached_tokens if usage else 0
    return {
        "input_tokens": usage.prompt_tokens - n_cached if usage else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": usage.completion_tokens if usage else 0,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens if usage else 0},
    }


def _content(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": _SIGNATURE})
    if text := content_of(choice):
        blocks.append({"type": "text", "text": text})
    for call in choice.tool_calls or ():
        blocks.append({**_call_block(call), "input": json.loads(call.function.arguments)})
    return blocks


def _call_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}


class Events(EventWriter):
    """A message of blocks, each with its start, its deltas and its stop."""

    def __init__(self, job_id: str, model: str) -> None:
        self._job_id = job_id
        self._frame = _frame(job_id, model)
        self._open: str | None = None
        self._index = -1

    def keep_alive(self) -> bytes:
        return event({"type": "ping"}, "ping")

    def begin(self) -> Iterator[bytes]:
        yield _named({"type": "message_start", "message": {**self._frame, "usage": _usage(None)}})

    def more(self, delta: Delta) -> Iterator[bytes]:
        if delta.call is not None:
            yield from self._start(_call_block(delta.call))
            yield self._delta({"type": "input_json_delta", "partial_json": delta.call.function.arguments})
        elif delta.kind == "reasoning":
            if self._open != "thinking":
                yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.text})
        else:
            if self._open != "text":
                yield from self._start({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})

    def end(self, results: Sequence[GenerationResult], first: Deltas) -> Iterator[bytes]:
        result = results[0]
        for delta in first.rest(result):
            yield from self.more(delta)
        yield from self._stop()
        yield _named({"type": "message_delta", "delta": _stop(result), "usage": _usage(result)})
        yield _named({"type": "message_stop"})

    def failed(self, failure: Failure) -> Iterator[bytes]:
        failure.request_id = self._job_id
        yield _named(_error_body(failure))

    def _start(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._open = block["type"]
        self._index += 1
        yield _named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _stop(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        if self._open is not None:
            yield _named({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _named({"type": "content_block_delta", "index": self._index, "delta": delta})


def _named(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; other statuses below 500 are `invalid_request_error`, and the rest `api_error`."""


def _error_body(failure: Failure) -> dict[str, Any]:
    """Clients shorten their conversation when a message begins with "prompt is too long"."""
    other = "invalid_request_error" if failure.status < 500 else "api_error"
    message = str(failure)
    if failure.error["code"] == TOO_LONG:
        found = re.search(r"prompt of (\d+) tokens.* context is (\d+)", message)
        message = f"prompt is too long: {f'{found[1]} tokens > {found[2]} maximum' if found else message}"
    error = {"type": _ERROR_TYPES.get(failure.status, other), "message": message}
    if "details" in failure.error:
        error["details"] = failure.error["details"]
    return {"type": "error", "error": error, "request_id": failure.request_id}
