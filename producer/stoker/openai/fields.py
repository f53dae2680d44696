"""The rule for each field of an OpenAI request body. Pure. docs/batches.md has the same table, and a test compares
them.

A field is *served* as it is, *mapped* to a field of stoker's, or *refused* by name. Fields that do not change the
answer are served by omitting them. A field that is ``null`` counts as omitted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal


class FieldRefused(Exception):
    """A field that cannot be served; nothing is run.

    Attributes:
        param: the field's name.
        code: OpenAI's code for such an error.
    """

    def __init__(self, param: str, why: str, code: str = "unsupported_parameter") -> None:
        super().__init__(f"'{param}' {why}")
        self.param = param
        self.code = code


@dataclass(frozen=True)
class BodyOptions:
    """The options that apply to all bodies.

    Attributes:
        model_aliases: from the model's name in a body to the name of the loaded model.
        any_model: run every body on the loaded model, even if it names another.
        max_tokens: for bodies without a limit; ``None`` for `fields.DEFAULT_MAX_TOKENS`.
    """

    model_aliases: Mapping[str, str] = field(default_factory=dict)
    any_model: bool = False
    max_tokens: int | None = None


Apply = Callable[[dict[str, Any], Any, BodyOptions], None]
"""Writes a value into the request's fields, or raises `FieldRefused`."""


@dataclass(frozen=True)
class Rule:
    verdict: Literal["served", "mapped", "refused"]
    note: str
    apply: Apply


def copied(name: str, note: str) -> dict[str, Rule]:
    """The request has a field of this name and this meaning."""

    def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        fields[name] = value

    return {name: Rule("served", note, apply)}


def omitted(name: str, note: str) -> dict[str, Rule]:
    """Does not change the answer."""
    return {name: Rule("served", note, lambda fields, value, options: None)}


def only(name: str, *values: Any, note: str) -> dict[str, Rule]:
    """Accepts only the values that change nothing, and refuses all others."""

    def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
            raise FieldRefused(name, f"is not served{_unless(values)}")

    return {name: Rule("refused", note, apply)}


def mapped(name: str, note: str, apply: Apply) -> dict[str, Rule]:
    """Becomes another field, or another value."""
    return {name: Rule("mapped", note, apply)}


def _unless(values: tuple[Any, ...]) -> str:
    return f" unless it is {' or '.join(_as_json(value) for value in values)}" if values else ""


def _as_json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


CHAT_URL: Final = "/v1/chat/completions"
TEXT_URL: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = {CHAT_URL: 1024, TEXT_URL: 16}
"""For bodies without a limit. OpenAI's chat has no default limit, its completions have 16."""

_OPENAI_TEMPERATURE: Final = 1.0
_NAME_CHARACTERS: Final = 64


def request_fields(url: str, body: Mapping[str, Any], options: BodyOptions) -> dict[str, Any]:
    """The fields of a `GenerationRequest`; `build_request` checks their ranges.

    Raises:
        FieldRefused: a field is unknown or cannot be served.
    """
    rules = RULES[url]
    fields: dict[str, Any] = {"temperature": _OPENAI_TEMPERATURE}
    for name, value in body.items():
        if name not in rules:
            raise FieldRefused(name[:_NAME_CHARACTERS], f"is not a known field of {url}", "unknown_parameter")
        if value is not None:
            rules[name].apply(fields, value, options)
    if body.get("model") is None and not options.any_model:
        raise FieldRefused("model", "is missing", "missing_required_parameter")
    if fields.get("tool_choice") == "none" and "tools" not in fields:
        del fields["tool_choice"]
    fields.setdefault("max_tokens", options.max_tokens or DEFAULT_MAX_TOKENS[url])
    return fields


def _model(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, str):
        raise FieldRefused("model", "is not a string", "invalid_value")
    if not options.any_model:
        fields["model"] = options.model_aliases.get(value, value)


def _limit(name: str) -> Apply:
    def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if fields.setdefault("max_tokens", value) != value:
            raise FieldRefused(name, "differs from the other limit", "invalid_value")

    return apply


def _user(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, str):
        raise FieldRefused("user", "is not a string", "invalid_value")
    fields.setdefault("agent_id", value)


def _metadata(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FieldRefused("metadata", "is not an object of strings", "invalid_value")
    if "agent_id" in value:
        fields["agent_id"] = value["agent_id"]


def _response_format(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if value != {"type": "text"}:
        fields["response_format"] = value


def _prompt(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise FieldRefused("prompt", "must be one string: give each prompt a request of its own; tokens are not served")
    fields["prompt"] = value


def _text_logprobs(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 5:
        raise FieldRefused("logprobs", "must be a whole number from 0 to 5", "invalid_value")
    fields["logprobs"], fields["top_logprobs"] = True, value


_COMMON: Final[dict[str, Rule]] = {
    **mapped("model", "must be the loaded model, unless `--model-alias` maps it or `--any-model` is given", _model),
    **copied("temperature", "1.0 by default, as at OpenAI (`stoker submit`: 0)"),
    **copied("top_p", "1 by default"),
    **copied("seed", "the same seed and prompt give the same text"),
    **copied("stop", "a string or a list of strings; up to 16"),
    **mapped("max_tokens", "by default `--max-tokens`, else 1024 for chat, 16 for text", _limit("max_tokens")),
    **mapped("user", "the agent, unless `metadata.agent_id` names one", _user),
    **copied("n", "1 to 16; above 1, an agent's job needs `cache` `read` or `off`"),
    **copied("frequency_penalty", "-2 to 2"),
    **copied("presence_penalty", "-2 to 2"),
    **copied("logit_bias", "from token ids to -100 to 100"),
    **only("stream", False, note="only false in a file, which has no stream; `stoker serve` streams"),
    **only("stream_options", note="always in a file; `stoker serve` takes `include_usage`"),
}  # fmt: skip

_OWN: Final[dict[str, Rule]] = {
    **copied("top_k", "not OpenAI's; see [the request](request.md)"),
    **copied("min_p", "not OpenAI's; see [the request](request.md)"),
    **copied("repetition_penalty", "not OpenAI's; see [the request](request.md)"),
    **copied("context", "not OpenAI's; `append` continues the agent's stored conversation"),
    **copied("cache", "not OpenAI's; see [the request](request.md)"),
    **copied("cache_salt", "not OpenAI's; see [the request](request.md)"),
    **copied("expect_version", "not OpenAI's; see [the request](request.md)"),
    **copied("must_exist", "not OpenAI's; see [the request](request.md)"),
    **copied("min_tokens", "not OpenAI's; see [the request](request.md)"),
    **copied("stop_token_ids", "not OpenAI's; see [the request](request.md)"),
    **copied("ignore_eos", "not OpenAI's; see [the request](request.md)"),
    **copied("guide", "not OpenAI's; a regex, a list of choices or a Lark grammar"),
    **copied("max_reasoning_tokens", "not OpenAI's; see [the request](request.md)"),
    **copied("prompt_logprobs", "not OpenAI's; the body has them as `prompt_logprobs`"),
    **copied("task", "not OpenAI's; the class of the line, for [trust](cheaper-first.md#trust) and for training"),
    **copied("prompt_logprobs_start", "not OpenAI's; see [the request](request.md)"),
}

_CHAT: Final[dict[str, Rule]] = {
    **copied("messages", "text only; other parts are refused by name"),
    **_COMMON,
    **mapped("max_completion_tokens", "`max_tokens`", _limit("max_completion_tokens")),
    **mapped("metadata", "`agent_id` names the agent; other keys are omitted", _metadata),
    **copied("logprobs", ""),
    **copied("top_logprobs", "0 to 20; needs `logprobs`"),
    **copied("tools", "calls are in the message's `tool_calls`"),
    **copied("tool_choice", "`auto`, `none`, `required`, or one tool by name"),
    **only("parallel_tool_calls", True, note="only true"),
    **mapped("response_format", "`text` changes nothing; `json_object`; `json_schema`", _response_format),
    **only("modalities", ["text"], note="only `[\"text\"]`"),
    **only("audio", note="always"),
    **only("functions", [], note="only empty: use `tools`"),
    **only("function_call", note="always: use `tools`"),
    **only("reasoning_effort", note="always: use `max_reasoning_tokens`, or `chat_template_kwargs`"),
    **only("verbosity", "medium", note="only `medium`, the default"),
    **only("web_search_options", note="always"),
    **only("moderation", note="always"),
    **omitted("prediction", "omitted: it changes only the speed"),
    **omitted("prompt_cache_key", "omitted: it concerns OpenAI's cache"),
    **omitted("prompt_cache_options", "omitted: it concerns OpenAI's cache"),
    **omitted("prompt_cache_retention", "omitted: it concerns OpenAI's cache"),
    **omitted("safety_identifier", "omitted: it concerns OpenAI's service"),
    **omitted("service_tier", "omitted: it concerns OpenAI's service"),
    **only("store", False, note="only false: answers are not kept for later requests"),
    **_OWN,
    **copied("chat_template_kwargs", "not OpenAI's; see [the request](request.md)"),
}  # fmt: skip

_TEXT: Final[dict[str, Rule]] = {
    **mapped("prompt", "one string, or a list with one", _prompt),
    **_COMMON,
    **mapped("metadata", "not OpenAI's here; `agent_id` names the agent", _metadata),
    **mapped("logprobs", "0 to 5; `logprobs` and `top_logprobs`", _text_logprobs),
    **only("best_of", 1, note="only 1"),
    **only("echo", False, note="only false; `prompt_logprobs` scores a prompt"),
    **only("suffix", note="always"),
    **_OWN,
}

RULES: Final[Mapping[str, Mapping[str, Rule]]] = {CHAT_URL: _CHAT, TEXT_URL: _TEXT}


def markdown_table(url: str) -> str:
    """The table of docs/batches.md."""
    rows = [f"| `{name}` | {rule.verdict} | {rule.note} |" for name, rule in sorted(RULES[url].items())]
    return "\n".join(["| field | | how |", "|---|---|---|", *rows])
