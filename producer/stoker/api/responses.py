"""OpenAI's Responses: fields, items, answers and events. Pure.

An item of the input becomes a chat message or a part of one: thinking and calls belong to the assistant's message
beside them. Tools that a server would have to run itself are left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stoker.api.deltas import Delta, Deltas
from stoker.api.endpoint import ApiCall, Endpoint, EventWriter, event, own_fields, take_flag
from stoker.api.failure import TOO_LONG, Failure, FieldRefused
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
from stoker_shared.result import Choice, GenerationResult, Logprobs, ToolCall

URL: Final = "/v1/responses"

_TEMPERATURE: Final = 1.0
_LOGPROBS: Final = "message.output_text.logprobs"
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_HOSTED: Final = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
        *("computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        "compaction",
    }
)
"""Items of tools that a server runs itself."""
REFERENCE: Final = "item_reference"


def response_id(job_id: str) -> str:
    return f"resp_{job_id}"


# --- the input ---


def messages_of(items: Any) -> list[dict[str, Any]]:
    """Chat messages of a response's input. Raises `FieldRefused`: an item is neither text nor of a function call."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise FieldRefused("input", "must be a text or a list of items", "invalid_value")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        _add_item(messages, checked(where, item, dict), where)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:  # thinking alone
            message["content"] = ""
    return messages


def items_of(value: Any) -> list[dict[str, Any]]:
    """The input as a list of items."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else list(value)


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = checked(f"{where}.type", item.get("type", "message"), str)
    if kind == "message":
        text = _text_of(item.get("content"), f"{where}.content")
        if item.get("role") == "assistant":
            _own_message(messages, "content")["content"] = text
        else:
            messages.append({"role": item.get("role"), "content": text})
    elif kind == "reasoning":
        if text := _thought(item.get("content")) or _thought(item.get("summary")):
            _own_message(messages, "reasoning_content")["reasoning_content"] = text
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments" if kind == "function_call" else "input")
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _own_message(messages, None).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text_of(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        hosted, stored = "are of tools that this server does not run", "work only where responses are stored"
        why = hosted if kind in _HOSTED else stored if kind == REFERENCE else "are not known"
        raise FieldRefused(where, f"has the type {kind[:64]!r}: such items {why}")


def _thought(parts: Any) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _own_message(messages: list[dict[str, Any]], part: str | None) -> dict[str, Any]:
    """The assistant's message to which the next part belongs: the last message, or a new one if that already has this
    part or a later one."""
    last = messages[-1] if messages else {}
    behind = {"reasoning_content": {"reasoning_content", "content", "tool_calls"}, "content": {"content", "tool_calls"}}
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in behind.get(part or "", ())):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _text_of(content: Any, where: str) -> str:
    """Raises `FieldRefused`: it has something other than text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldRefused(where, "must be a text or a list of parts", "invalid_value")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise FieldRefused(f"{where}[{number}]", f"has the type {str(kind)[:64]!r}: only text is served")
        texts.append(text)
    return "\n".join(texts)


# --- the fields ---


def _input(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    fields["messages"] = [*fields.get("messages", ()), *messages_of(value)]


def _instructions(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if checked("instructions", value, str):
        fields["messages"] = [{"role": "system", "content": value}, *fields.get("messages", ())]


def _tools(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise FieldRefused("tools", "is not a list of objects", "invalid_value")
    functions = [tool for tool in value if tool.get("type") == "function"]
    names = ("name", "description", "parameters", "strict")
    fields["tools"] = [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in functions
    ]


def _tool_choice(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if isinstance(value, dict):
        if value.get("type") == "allowed_tools":
            fields["allowed_tools"], value = value.get("tools"), value.get("mode")
        elif value.get("type") == "function":
            value = {"type": "function", "function": {"name": value.get("name")}}
        else:
            raise FieldRefused("tool_choice", "names a tool that this server does not run")
    fields["tool_choice"] = value


def _text(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, dict) or set(value) - {"format", "verbosity"}:
        raise FieldRefused("text", "must be an object with 'format' and 'verbosity'", "invalid_value")
    form = value.get("format")
    if form is None or form == {"type": "text"}:
        return
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    fields["response_format"] = form


def _reasoning(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if checked("reasoning", value, dict).get("effort") is not None:
        reasoning_effort(fields, value["effort"], options)


def _include(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if _LOGPROBS in checked("include", value, list):
        fields["logprobs"] = True


def _top_logprobs(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if value:
        fields["logprobs"], fields["top_logprobs"] = True, value


RULES: Final[Mapping[str, Rule]] = {
    "model": model_rule,
    "input": _input,
    "instructions": _instructions,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "text": _text,
    "reasoning": _reasoning,
    "include": _include,
    "top_logprobs": _top_logprobs,
    **limit("max_output_tokens"),
    **copied("temperature", "top_p", "parallel_tool_calls"),
    **session("prompt_cache_key", "user"),
    **ignored("metadata", "safety_identifier", "service_tier", "client_metadata", "access_programs"),
    **ignored("prompt_cache_options", "prompt_cache_retention", "background_options"),
    **only("truncation", "disabled"),
    **only("context_management", []),
    **only("conversation"),
    **only("image"),
    **only("max_tool_calls"),
    **only("moderation"),
    **only("prompt"),
    # Not OpenAI's:
    "chat_template_kwargs": template_kwargs,
    **copied("cache", "cache_salt", "guide", "max_reasoning_tokens", "min_p", "seed", "stop"),
    **copied("task", "top_k", "repetition_penalty"),
}
"""Besides these: `stream`, `stream_options`, `store`, `background` and `previous_response_id`."""


class Responses(Endpoint):
    url = URL
    is_raw = False

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        is_streamed = take_flag(body, "stream")
        body.pop("stream_options", None)
        store, background = take_flag(body, "store", default=True), take_flag(body, "background")
        if background and not store:
            raise FieldRefused("background", "needs 'store'", "invalid_value")
        previous = body.pop("previous_response_id", None)
        if previous is not None:
            checked("previous_response_id", previous, str)
        if body.get("input") is None:
            raise FieldRefused("input", "is missing", "missing_required_parameter")
        fields: dict[str, Any] = {"temperature": _TEMPERATURE}
        apply_rules(RULES, URL, body, fields, options)
        _require_tools(fields)
        default_limit(fields, options)
        return ApiCall(
            (fields,),
            str(body.get("model")),
            is_streamed,
            {**_echo(body, fields, previous), "background": background},
            is_stored=store,
            is_background=background,
            continues=previous,
            n_instructions=bool(body.get("instructions")),
            input=items_of(body["input"]) if store else None,
        )

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        (result,) = results
        is_cut = result.finish_reason == "length"
        return {
            **frame(response_id(result.job_id), created_s, kept, "incomplete" if is_cut else "completed"),
            "model": result.model,
            "completed_at": created_s,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(_output(result.job_id, result)),
            "usage": _usage(result),
            **own_fields(result),
        }

    def events(self, job_id: str, call: ApiCall, created_s: int) -> "ResponseEvents":
        return ResponseEvents(job_id, call, created_s)


RESPONSES: Final = Responses()


def ended_response(result: GenerationResult, created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The response of a job that was enqueued at `created_s`, in Unix seconds. `Responses.answer` is for the time at
    which the job ended."""
    completed_s = created_s + round(result.timing.total_s)
    return {**RESPONSES.answer([result], created_s, kept), "completed_at": completed_s}


def _require_tools(fields: dict[str, Any]) -> None:
    """Keep only the allowed tools; without tools, drop a `tool_choice` that needs none."""
    allowed = fields.pop("allowed_tools", None)
    if isinstance(allowed, list):
        named = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
        names = {name for name in named if isinstance(name, str)}
        given = [(tool, tool["function"].get("name")) for tool in fields.get("tools", ())]
        fields["tools"] = [tool for tool, name in given if isinstance(name, str) and name in names]
    if not fields.get("tools"):
        fields.pop("tools", None)
        if fields.get("tool_choice") in ("auto", "none"):
            del fields["tool_choice"]


def _echo(body: Mapping[str, Any], fields: Mapping[str, Any], previous: str | None) -> dict[str, Any]:
    """The parts of the request that its response repeats."""
    tools = [
        {"parameters": None, "strict": None, "type": "function", **tool["function"]} for tool in fields.get("tools", ())
    ]
    text = body.get("text") or {}
    return {
        "model": str(body.get("model")),
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": previous,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "temperature": fields["temperature"],
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": tools,
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "user": body.get("user"),
    }


# --- the answer ---


def frame(of: str, created_s: int, kept: Mapping[str, Any], status: str) -> dict[str, Any]:
    """A response without its output.

    Args:
        of: its id.
        kept: `kept` of the call; empty if only the result is known.
        status: OpenAI's word.
    """
    unknown = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {
        "id": of,
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "truncation": "disabled",
        **(kept or unknown),
        "output": [],
        "usage": None,
    }


def failed_response(frame: Mapping[str, Any], failure: Failure) -> dict[str, Any]:
    code = "invalid_prompt" if failure.status == 400 else "server_error"
    if failure.error["code"] == TOO_LONG:
        code = TOO_LONG
    return {**frame, "status": "failed", "error": {"code": code, "message": str(failure)}}


def _output(job_id: str, choice: Choice) -> Iterator[dict[str, Any]]:
    """The items of an answer: thinking, text, calls."""
    calls = choice.tool_calls or []
    if choice.reasoning is not None:
        yield _reasoning_item(job_id, choice.reasoning)
    if choice.content.strip() or not calls:
        yield _message_item(job_id, choice.content, choice.logprobs, is_cut=choice.finish_reason == "length")
    for number, call in enumerate(calls):
        yield _call_item(job_id, number, call)


def _reasoning_item(job_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{job_id}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message_item(job_id: str, text: str, logprobs: Logprobs | None, *, is_cut: bool) -> dict[str, Any]:
    status = "incomplete" if is_cut else "completed"
    scores = [] if logprobs is None else [entry.model_dump(mode="json") for entry in logprobs.content]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
    return {"id": f"msg_{job_id}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _call_item(job_id: str, number: int, call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{job_id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.function.name,
        "arguments": call.function.arguments,
        "status": "completed",
    }


def _usage(result: GenerationResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# --- the events ---


class ResponseEvents(EventWriter):
    """One item of the output is open at a time.

    If thinking comes between two texts, each text is an item of its own; the answer without `stream` has only one.
    """

    def __init__(self, job_id: str, call: ApiCall, created_s: int) -> None:
        self._job_id = job_id
        self._frame = frame(response_id(job_id), created_s, call.kept, "in_progress")
        self._created_s = created_s
        self._kept = call.kept
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open = ""
        self._text = ""
        self._place: dict[str, Any] = {}

    def keep_alive(self) -> bytes:
        """An event: Codex gives a stream up after five minutes in which it had comments only."""
        return self._event("in_progress", response=self._frame)

    def begin(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._frame)

    def more(self, delta: Delta) -> Iterator[bytes]:
        if delta.call is not None:
            yield from self._close()
            yield from self._call(delta.number, delta.call)
            return
        if delta.kind != self._open:
            yield from self._close()
            yield from self._begin_item(delta.kind)
        self._text += delta.text
        scores: dict[str, Any] = {"logprobs": []} if delta.kind == "text" else {}
        yield self._event(f"{self._stem}.delta", **self._place, delta=delta.text, **scores)

    def end(self, results: Sequence[GenerationResult], first: Deltas) -> Iterator[bytes]:
        (result,) = results
        is_cut = result.finish_reason == "length"
        for delta in first.rest(result):
            if delta.call is not None:  # the text is complete
                yield from self._close(result.logprobs, is_cut=is_cut)
            yield from self.more(delta)
        has_text = self._open == "text" or any(item["type"] != "reasoning" for item in self._items)
        if not has_text:
            yield from self.more(Delta("text"))
        yield from self._close(result.logprobs, is_cut=is_cut)
        response = {**ended_response(result, self._created_s, self._kept), "output": self._items}
        yield self._event(response["status"], response=response)

    def failed(self, failure: Failure) -> Iterator[bytes]:
        yield self._event("failed", response=failed_response(self._frame, failure))

    @property
    def _index(self) -> int:
        return len(self._items)

    @property
    def _stem(self) -> str:
        return "reasoning_text" if self._open == "reasoning" else "output_text"

    def _item(self, logprobs: Logprobs | None = None, *, is_cut: bool = False) -> dict[str, Any]:
        """The open item, with its text so far."""
        if self._open == "reasoning":
            item = _reasoning_item(self._job_id, self._text)
        else:
            item = _message_item(self._job_id, self._text, logprobs, is_cut=is_cut)
        if any(other["id"] == item["id"] for other in self._items):
            item["id"] = f"{item['id']}_{self._index}"
        return item

    def _begin_item(self, kind: str) -> Iterator[bytes]:
        self._open, self._text = kind, ""
        item = self._item()
        self._place = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
        added = {**item, "content": [], "status": "in_progress"}
        yield self._event("output_item.added", output_index=self._index, item=added)
        yield self._event("content_part.added", **self._place, part=item["content"][0])

    def _close(self, logprobs: Logprobs | None = None, *, is_cut: bool = False) -> Iterator[bytes]:
        if not self._open:
            return
        item = self._item(logprobs, is_cut=is_cut)
        [part] = item["content"]
        more: dict[str, Any] = {"logprobs": part["logprobs"]} if self._open == "text" else {}
        yield self._event(f"{self._stem}.done", **self._place, text=self._text, **more)
        yield self._event("content_part.done", **self._place, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._open = ""
        self._items.append(item)

    def _call(self, number: int, call: ToolCall) -> Iterator[bytes]:
        item = _call_item(self._job_id, number, call)
        place = {"item_id": item["id"], "output_index": self._index}
        added = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=self._index, item=added)
        yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._items.append(item)

    def _event(self, event_name: str, /, **fields: Any) -> bytes:
        kind = f"response.{event_name}"
        made = event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return made


def input_items(items: Iterable[Any]) -> list[dict[str, Any]]:
    """The input as a list of items with ids, newest first, as the API lists them."""
    listed = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        form = {"type": kind, **item, "id": item.get("id") or f"item_{number}"}
        if kind == "message" and isinstance(form.get("content"), str):
            part = "output_text" if form.get("role") == "assistant" else "input_text"
            form["content"] = [{"type": part, "text": form["content"]}]
        listed.append(form)
    return listed[::-1]
