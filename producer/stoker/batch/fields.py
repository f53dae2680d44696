"""The rule for each field of an OpenAI request body. Pure. docs/batches.md has the same table, and a test compares
them.

A field is *served* as it is, *mapped* to a field of stoker's, or *refused* by name. Fields that do not change the
answer are served by omitting them. A field that is ``null`` counts as omitted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

CHAT_URL: Final = "/v1/chat/completions"
TEXT_URL: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = {CHAT_URL: 1024, TEXT_URL: 16}
"""For lines without a limit. OpenAI's chat has no default limit, its completions have 16."""

_OPENAI_TEMPERATURE: Final = 1.0
_NAME_CHARACTERS: Final = 64


class FieldRefused(Exception):
    """A field that cannot be served; the line is not run.

    Attributes:
        param: the field's name.
        code: OpenAI's code for such an error.
    """

    def __init__(self, param: str, why: str, code: str = "unsupported_parameter") -> None:
        super().__init__(f"'{param}' {why}")
        self.param = param
        self.code = code


@dataclass(frozen=True)
class LineOptions:
    """The options that apply to all lines.

    Attributes:
        model_aliases: from the model's name in a line to the name of the loaded model.
        any_model: run every line on the loaded model, even if it names another.
        max_tokens: for lines without a limit; ``None`` for `DEFAULT_MAX_TOKENS`.
    """

    model_aliases: Mapping[str, str] = field(default_factory=dict)
    any_model: bool = False
    max_tokens: int | None = None


Apply = Callable[[dict[str, Any], Any, LineOptions], None]
"""Writes a value into the request's fields, or raises `FieldRefused`."""


@dataclass(frozen=True)
class Rule:
    verdict: Literal["served", "mapped", "refused"]
    note: str
    apply: Apply


def request_fields(url: str, body: Mapping[str, Any], options: LineOptions) -> dict[str, Any]:
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
    if body.get("tool_choice") == "none":
        fields.pop("tools", None)
    fields.setdefault("max_tokens", options.max_tokens or DEFAULT_MAX_TOKENS[url])
    return fields


def _copied(name: str, note: str) -> dict[str, Rule]:
    def apply(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
        fields[name] = value

    return {name: Rule("served", note, apply)}


def _omitted(name: str, note: str) -> dict[str, Rule]:
    return {name: Rule("served", note, lambda fields, value, options: None)}


def _only(name: str, *values: Any, note: str) -> dict[str, Rule]:
    """Accepts only the values that change nothing, and refuses all others."""

    def apply(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
            raise FieldRefused(name, f"is not served{_unless(values)}")

    return {name: Rule("refused", note, apply)}


def _mapped(name: str, note: str, apply: Apply) -> dict[str, Rule]:
    return {name: Rule("mapped", note, apply)}


def _unless(values: tuple[Any, ...]) -> str:
    return f" unless it is {' or '.join(_as_json(value) for value in values)}" if values else ""


def _as_json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


def _model(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if not isinstance(value, str):
        raise FieldRefused("model", "is not a string", "invalid_value")
    if not options.any_model:
        fields["model"] = options.model_aliases.get(value, value)


def _limit(name: str) -> Apply:
    def apply(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
        if fields.setdefault("max_tokens", value) != value:
            raise FieldRefused(name, "differs from the other limit in the line", "invalid_value")

    return apply


def _user(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if not isinstance(value, str):
        raise FieldRefused("user", "is not a string", "invalid_value")
    fields.setdefault("agent_id", value)


def _metadata(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FieldRefused("metadata", "is not an object of strings", "invalid_value")
    if "agent_id" in value:
        fields["agent_id"] = value["agent_id"]


def _tool_choice(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if value not in ("auto", "none"):
        raise FieldRefused("tool_choice", "is not served unless it is auto or none")


def _tools(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if value != []:
        fields["tools"] = value


def _prompt(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise FieldRefused("prompt", "must be one string: several prompts are several lines, and tokens are not served")
    fields["prompt"] = value


def _text_logprobs(fields: dict[str, Any], value: Any, options: LineOptions) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 5:
        raise FieldRefused("logprobs", "must be a whole number from 0 to 5", "invalid_value")
    fields["logprobs"], fields["top_logprobs"] = True, value


_COMMON: Final[dict[str, Rule]] = {
    **_mapped("model", "must be the loaded model, unless `--model-alias` maps it or `--any-model` is given", _model),
    **_copied("temperature", "1.0 by default, as at OpenAI (`stoker submit`: 0)"),
    **_copied("top_p", "1 by default"),
    **_copied("seed", "the same seed and prompt give the same text"),
    **_copied("stop", "a string or a list of strings; up to 16"),
    **_mapped("max_tokens", "by default `--max-tokens`, else 1024 for chat, 16 for text", _limit("max_tokens")),
    **_mapped("user", "the agent, unless `metadata.agent_id` names one", _user),
    **_only("n", 1, note="only 1: use several lines"),
    **_only("frequency_penalty", 0, note="only 0; use `repetition_penalty`"),
    **_only("presence_penalty", 0, note="only 0; use `repetition_penalty`"),
    **_only("logit_bias", {}, note="only empty"),
    **_only("stream", False, note="only false: a file has no stream"),
    **_only("stream_options", note="always"),
}  # fmt: skip

_OWN: Final[dict[str, Rule]] = {
    **_copied("top_k", "not OpenAI's; see the README"),
    **_copied("min_p", "not OpenAI's; see the README"),
    **_copied("repetition_penalty", "not OpenAI's; see the README"),
    **_copied("context", "not OpenAI's; `append` continues the agent's stored conversation"),
    **_copied("cache", "not OpenAI's; see the README"),
    **_copied("cache_salt", "not OpenAI's; see the README"),
}

_CHAT: Final[dict[str, Rule]] = {
    **_copied("messages", "text only; other parts are refused by name"),
    **_COMMON,
    **_mapped("max_completion_tokens", "`max_tokens`", _limit("max_completion_tokens")),
    **_mapped("metadata", "`agent_id` names the agent; other keys are omitted", _metadata),
    **_copied("logprobs", ""),
    **_copied("top_logprobs", "0 to 20; needs `logprobs`"),
    **_mapped("tools", "passed to the chat template; calls are in `content` as the model wrote them", _tools),
    **_mapped("tool_choice", "`auto`; `none` omits the tools; all other values are refused", _tool_choice),
    **_only("parallel_tool_calls", True, note="only true"),
    **_only("response_format", {"type": "text"}, note="only `{\"type\": \"text\"}`"),
    **_only("modalities", ["text"], note="only `[\"text\"]`"),
    **_only("audio", note="always"),
    **_only("functions", [], note="only empty: use `tools`"),
    **_only("function_call", note="always: use `tools`"),
    **_only("reasoning_effort", note="always: some templates have options for it, see `chat_template_kwargs`"),
    **_only("verbosity", "medium", note="only `medium`, the default"),
    **_only("web_search_options", note="always"),
    **_only("moderation", note="always"),
    **_omitted("prediction", "omitted: it changes only the speed"),
    **_omitted("prompt_cache_key", "omitted: it concerns OpenAI's cache"),
    **_omitted("prompt_cache_options", "omitted: it concerns OpenAI's cache"),
    **_omitted("prompt_cache_retention", "omitted: it concerns OpenAI's cache"),
    **_omitted("safety_identifier", "omitted: it concerns OpenAI's service"),
    **_omitted("service_tier", "omitted: it concerns OpenAI's service"),
    **_only("store", False, note="only false: answers are not kept for later requests"),
    **_OWN,
    **_copied("chat_template_kwargs", "not OpenAI's; see the README"),
}  # fmt: skip

_TEXT: Final[dict[str, Rule]] = {
    **_mapped("prompt", "one string, or a list with one", _prompt),
    **_COMMON,
    **_mapped("metadata", "not OpenAI's here; `agent_id` names the agent", _metadata),
    **_mapped("logprobs", "0 to 5; `logprobs` and `top_logprobs`", _text_logprobs),
    **_only("best_of", 1, note="only 1"),
    **_only("echo", False, note="only false"),
    **_only("suffix", note="always"),
    **_OWN,
}

RULES: Final[Mapping[str, Mapping[str, Rule]]] = {CHAT_URL: _CHAT, TEXT_URL: _TEXT}


def markdown_table(url: str) -> str:
    """The table of docs/batches.md."""
    rows = [f"| `{name}` | {rule.verdict} | {rule.note} |" for name, rule in sorted(RULES[url].items())]
    return "\n".join(["| field | | how |", "|---|---|---|", *rows])
