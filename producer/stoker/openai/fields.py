"""The rule for each field of an OpenAI request body, which docs/batches.md lists. Pure.

A field is copied as it is, becomes another field, is ignored because it does not change the answer, or is refused by
name. A field that is ``null`` counts as omitted.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final


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


Rule = Callable[[dict[str, Any], Any, BodyOptions], None]
"""Writes a body's value into the request's fields, or raises `FieldRefused`."""


def _copied(*names: str) -> dict[str, Rule]:
    """The request has fields of these names and meanings."""

    def copy(name: str) -> Rule:
        return lambda fields, value, options: fields.update({name: value})

    return {name: copy(name) for name in names}


def _ignored(*names: str) -> dict[str, Rule]:
    """These fields do not change the answer."""
    return dict.fromkeys(names, lambda fields, value, options: None)


def _only(name: str, *values: Any) -> dict[str, Rule]:
    """Accepts only the values that change nothing, and refuses all others."""

    def check(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
            unless = f" unless it is {' or '.join(map(json.dumps, values))}" if values else ""
            raise FieldRefused(name, f"is not served{unless}")

    return {name: check}


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
            rules[name](fields, value, options)
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


def _limit(name: str) -> Rule:
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
    "model": _model,
    "max_tokens": _limit("max_tokens"),
    "user": _user,
    "metadata": _metadata,
    **_copied("temperature", "top_p", "seed", "stop", "n", "frequency_penalty", "presence_penalty", "logit_bias"),
    **_only("stream", False),
    **_only("stream_options"),
    # Not OpenAI's:
    **_copied("context", "cache", "cache_salt", "expect_version", "must_exist", "task"),
    **_copied("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "guide"),
    **_copied("max_reasoning_tokens", "prompt_logprobs", "prompt_logprobs_start"),
}

_CHAT: Final[dict[str, Rule]] = {
    **_COMMON,
    "max_completion_tokens": _limit("max_completion_tokens"),
    "response_format": _response_format,
    **_copied("messages", "logprobs", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"),
    **_ignored("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_ignored("safety_identifier", "service_tier"),
    **_only("parallel_tool_calls", True),
    **_only("modalities", ["text"]),
    **_only("audio"),
    **_only("functions", []),
    **_only("function_call"),
    **_only("reasoning_effort"),
    **_only("verbosity", "medium"),
    **_only("web_search_options"),
    **_only("moderation"),
    **_only("store", False),
}

_TEXT: Final[dict[str, Rule]] = {
    **_COMMON,
    "prompt": _prompt,
    "logprobs": _text_logprobs,
    **_only("best_of", 1),
    **_only("echo", False),
    **_only("suffix"),
}

RULES: Final[Mapping[str, Mapping[str, Rule]]] = {CHAT_URL: _CHAT, TEXT_URL: _TEXT}
