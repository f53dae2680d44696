"""A generation request and its validation; no I/O.

Both sides use this model: the producer refuses a bad request before it is enqueued, and the worker refuses one from any
other client (plain RQ, redis-cli, another language) with the same message.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stoker_shared.check import Check
from stoker_shared.errors import InvalidRequest, RequestTooLarge, RequestVersionTooNew
from stoker_shared.job_data import MAX_DATA_BYTES, require_bounds
from stoker_shared.message import Message, as_tuple
from stoker_shared.route import ModelName, RouteStep
from stoker_shared.text import printable
from stoker_shared.wire import MAX_REQUEST_BYTES, REQUEST_VERSION

RequestT = TypeVar("RequestT", bound=BaseModel)
_MAX_PROBLEMS_SHOWN: Final = 8
_MAX_PROBLEMS_READ: Final = 1000  # pydantic makes a dict of each
_IN_OUR_WORDS: Final = {
    "extra_forbidden": "there is no such field",
    "model_type": "must be an object",  # pydantic names a Python class
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
}
"""By pydantic's type of the problem."""


def validated(model: type[RequestT], fields: Mapping[str, Any], *, newest_version: int) -> RequestT:
    """A request of this model; `newest_version` is the largest `v` that this code reads. Raises as `build_request`."""
    version = fields.get("v", 1)
    if isinstance(version, int) and version > newest_version:
        raise RequestVersionTooNew(f"the request has v {version}, this side reads up to v {newest_version}: update it")
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        raise InvalidRequest(_problems_of(error)) from None


def _problems_of(error: ValidationError) -> str:
    """One line with each problem as `field: message`, without the input: errors must not quote prompts."""
    if error.error_count() > _MAX_PROBLEMS_READ:
        return f"there are {error.error_count()} problems with it, too many to name them"
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(_shown(part) for part in problem["loc"])
        message = _IN_OUR_WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {message}" if field else message)
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        problems[_MAX_PROBLEMS_SHOWN:] = [f"and {len(problems) - _MAX_PROBLEMS_SHOWN} more"]
    return "; ".join(problems)


def _shown(name: int | str) -> str:
    """A field's name for a short line: an unknown field may have any name."""
    return printable(str(name))[:64]


def is_plain_json(value: object) -> bool:
    """True if the value can be written as JSON in UTF-8. pydantic does not check that: it accepts any value for `Any`,
    and surrogates in a `str`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=_fields_of_model).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _fields_of_model(value: object) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        raise TypeError
    return dict(value)


MOST_CHOICES: Final = 1024
"""Largest number of strings in a `Guide.choice`."""

_FORM = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, serialize_by_alias=True)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class NamedFunction(BaseModel):
    model_config = _FORM

    name: Annotated[str, Field(min_length=1)]


class NamedTool(BaseModel):
    """OpenAI's form of `tool_choice` for one tool, which must be called."""

    model_config = _FORM

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool
"""`auto`: the model decides; `none`: it calls no tool; `required`: it must call one."""


class JsonSchema(BaseModel):
    """OpenAI's form. `schema_` is the JSON Schema, `schema` in JSON. `strict` makes no difference: the answer always
    follows the schema here."""

    model_config = _FORM

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`: `text` constrains nothing, `json_object` allows any JSON object."""

    model_config = _FORM

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' goes with type 'json_schema', and only with it")
        return self


class Guide(BaseModel):
    """The texts that the answer may be; exactly one field is set.

    Attributes:
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these.
        lark: a grammar in Lark's notation, as llguidance reads it; its rule `start` is the answer.
    """

    model_config = _FORM

    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...],
            Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True),
            BeforeValidator(_as_tuple),
        ]
        | None
    ) = None
    lark: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one_language(self) -> Self:
        if sum(value is not None for value in (self.regex, self.choice, self.lark)) != 1:
            raise ValueError("exactly one of 'regex', 'choice' and 'lark' must be given")
        return self


def with_text_keys(value: object) -> object:
    """Whole numbers as keys become text: keys in JSON are text, and callers in Python give token ids as numbers."""
    if not isinstance(value, Mapping):
        return value
    return {str(key) if type(key) is int else key: bias for key, bias in value.items()}


MOST_MESSAGES: Final = 10_000
MOST_TOOLS: Final = 1_000
_MOST_TEMPLATE_KWARGS: Final = 100
_IN_RQS_FRAME: Final = b'["",null,[],{"":%b}]'
_FREE_FORM_FIELDS = ("messages", "tools", "chat_template_kwargs", "metadata", "response_format", "guide", "check")


def _is_printable(value: str) -> str:
    if (found := next((character for character in value if printable(character) != character), None)) is not None:
        raise ValueError(f"must hold printable characters only, found {found!r}")
    return value


READS_ONLY: Final = (
    "only for jobs that write no agent's memory, which belongs to one model: "
    "give cache 'read' or 'off', or one 'model' and its queue"
)
"""Why a job that writes an agent's memory cannot ask several models."""

Access = Literal["write", "read", "none"]
"""How a job uses its agent's memory. `write`: the agent's writing jobs run one at a time, in order. `read`: beside
other readers, after the writes enqueued before it and before those enqueued after it. `none`: in no order, because the
job has no agent or does not touch the memory."""

AgentId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_is_printable)]
"""1 to 200 printable characters, also ``../``, emoji and spaces; never used as a path as it is."""


def _is_label(value: str) -> str:
    if not re.fullmatch(r"[!-~]{1,64}", value):
        raise ValueError("must be 1 to 64 ASCII characters without spaces")
    return value


class GenerationRequest(BaseModel):
    """One generation job; frozen.

    Names and ranges are OpenAI's and mlx-lm's. Unknown fields are refused, so a new field needs a new `v`.
    ``docs/request.md`` explains each field, ``docs/lifecycle.md`` a job's life.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    v: Annotated[int, Field(ge=1)] = REQUEST_VERSION
    agent_id: AgentId | None = None
    session: AgentId | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_token_ids: (
        Annotated[
            tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, fail_fast=True), BeforeValidator(as_tuple)
        ]
        | None
    ) = None
    messages: (
        Annotated[tuple[Message, ...], Field(max_length=MOST_MESSAGES, fail_fast=True), BeforeValidator(as_tuple)]
        | None
    ) = None
    context: Literal["full", "append"] = "full"
    expect_version: Annotated[int, Field(ge=0)] | None = None
    must_exist: bool = False
    cache: Literal["readwrite", "read", "off"] = "readwrite"
    max_tokens: Annotated[int, Field(ge=0)] = 256
    fit_max_tokens: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=16, fail_fast=True), BeforeValidator(as_tuple)
    ] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64, fail_fast=True), BeforeValidator(as_tuple)
    ] = ()
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100.0, le=100.0)]],
            Field(max_length=1024),
            BeforeValidator(with_text_keys),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs_start: Annotated[int, Field(ge=0)] = 0
    return_prompt: bool = False
    tools: (
        Annotated[tuple[dict[str, Any], ...], Field(max_length=MOST_TOOLS, fail_fast=True), BeforeValidator(as_tuple)]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    guide: Guide | None = None
    max_reasoning_tokens: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=_MOST_TEMPLATE_KWARGS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    model: ModelName | None = None
    check: Check | None = None
    route: Annotated[tuple[RouteStep, ...], Field(max_length=8, fail_fast=True), BeforeValidator(as_tuple)] = ()
    max_cost_s: Annotated[float, Field(gt=0.0)] | None = None
    task: Annotated[str, AfterValidator(_is_label)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if sum(given is not None for given in (self.prompt, self.prompt_token_ids, self.messages)) != 1:
            raise ValueError("exactly one of 'prompt', 'prompt_token_ids' and 'messages' must be given")
        if self.messages == ():
            raise ValueError("'messages' must hold at least one message")
        if self.session is not None and self.agent_id is not None:
            raise ValueError("a session keeps caches only, an agent its conversation: give 'session' or 'agent_id'")
        if self.context == "append" and self.agent_id is None:
            raise ValueError("context 'append' continues an agent's conversation, so it needs 'agent_id'")
        if self.context == "full" and (self.expect_version is not None or self.must_exist):
            raise ValueError("'expect_version' and 'must_exist' are for context 'append'")
        if self.context == "append" and self.cache == "off":
            raise ValueError("context 'append' continues the agent's memory, so cache 'off' is refused with it")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            raise ValueError("'tools' and 'chat_template_kwargs' go to the chat template, so they need 'messages'")
        self._output_fields_agree()
        self._route_agrees()
        if any(len(key) > 64 or len(value) > 512 for key, value in self.metadata.items()):
            raise ValueError("'metadata' keys are at most 64 characters and values at most 512")
        for field in _FREE_FORM_FIELDS:
            if not is_plain_json(getattr(self, field)):
                raise ValueError(f"'{field}' must be plain JSON: no NaN, no lone surrogates, no other Python objects")
        return self

    def _output_fields_agree(self) -> None:
        if self.access == "write" and (self.n > 1 or self.max_tokens == 0):
            raise ValueError("'n' above 1 and 'max_tokens' 0 add no turn to an agent: give cache 'read' or 'off'")
        if self.min_tokens > self.max_tokens:
            raise ValueError("'min_tokens' must not be above 'max_tokens'")
        if self.prompt_logprobs is None and self.prompt_logprobs_start:
            raise ValueError("'prompt_logprobs_start' needs 'prompt_logprobs'")
        if self.messages is None and self.tool_choice is not None:
            raise ValueError("'tool_choice' needs 'messages'")
        if not self.tools and self.must_call:
            raise ValueError("this 'tool_choice' needs 'tools'")
        if self.is_formed and self.guide is not None:
            raise ValueError("'response_format' and 'guide' both say what the answer is: give one of them")
        if (self.is_formed or self.guide is not None) and self.tools and self.tool_choice != "none":
            raise ValueError("'tools' and 'response_format' or 'guide' go together only with tool_choice 'none'")

    def _route_agrees(self) -> None:
        if self.check is not None and (self.n > 1 or self.max_tokens == 0):
            raise ValueError("'check' is for one answer: it goes neither with 'n' above 1 nor with 'max_tokens' 0")
        if self.check is not None and self.check.min_mean_logprob is not None and not self.logprobs:
            raise ValueError("'check.min_mean_logprob' needs 'logprobs': true")
        if self.route and self.model is not None:
            raise ValueError("'route' and 'model' both name models: give one of them")
        if self.route and self.context == "append":
            raise ValueError("context 'append' continues what one model has stored: 'route' is refused with it")
        if self.route and self.access == "write":
            raise ValueError(f"'route' is {READS_ONLY}")
        if len(self.route) > 1 and self.check is None:
            raise ValueError("'route' goes on to the next model by a 'check': give one")
        models: dict[str, str] = {}
        for step in self.route:
            if (other := models.setdefault(step.queue, step.model)) != step.model:
                both = f"{other!r} and {step.model!r} in queue {step.queue!r}"
                raise ValueError(f"'route' has {both}, but a queue serves one model")

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def only_counts(self) -> bool:
        """True if the job only counts the prompt's tokens, or returns the prompt as the model would read it."""
        return self.max_tokens == 0 and self.prompt_logprobs is None

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def is_formed(self) -> bool:
        """True if the answer has to be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def has_form(self) -> bool:
        """True if a grammar limits the answer."""
        return self.is_formed or self.guide is not None or self.must_call

    @property
    def is_guided(self) -> bool:
        """True if a guide masks tokens at some place: for the answer's form, its calls or its thinking."""
        return self.has_form or not self.parallel_tool_calls or self.max_reasoning_tokens is not None

    @property
    def is_judged(self) -> bool:
        """True if its answers get verdicts, which are counted for its class of tasks."""
        return self.check is not None or bool(self.route) or self.task is not None

    @property
    def access(self) -> "Access":
        """How the job uses its agent's memory, and so for which of the agent's other jobs it waits."""
        if self.agent_id is None or self.cache == "off":
            return "none"
        return "read" if self.cache == "read" else "write"

    def as_payload(self) -> dict[str, Any]:
        """The JSON object that goes on the wire: the fields that differ from their defaults, and those of
        `WORKERS_DEFAULTS` that were set.

        Raises:
            RequestTooLarge: as UTF-8 JSON it is over ``MAX_REQUEST_BYTES``, or has more values or levels than a worker
                reads.
            InvalidRequest: a value is nested too deeply to be written.
        """
        try:
            fields = self.model_dump(mode="json", exclude_defaults=True, exclude={"v"})
        except ValueError:  # pydantic's message could quote the value
            raise InvalidRequest("the request cannot be written as JSON: a value is nested too deeply") from None
        for name in WORKERS_DEFAULTS & self.model_fields_set:
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        payload = {"v": REQUEST_VERSION, **fields}
        text = json.dumps(payload, ensure_ascii=False).encode()
        if len(text) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(f"the request is {len(text)} bytes of JSON, the limit is {MAX_REQUEST_BYTES}")
        require_bounds(_IN_RQS_FRAME % text, MAX_DATA_BYTES)
        return payload


WORKERS_DEFAULTS: Final = frozenset(
    {
        *("max_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
)
"""The fields whose default a worker may set (``--default``), for requests that do not set them or set ``null``."""


def build_request(fields: Mapping[str, Any]) -> GenerationRequest:
    """Validate the fields of one request.

    Raises:
        RequestVersionTooNew: `v` is above ``REQUEST_VERSION``.
        InvalidRequest: anything else; the message names each bad field.
    """
    return validated(GenerationRequest, fields, newest_version=REQUEST_VERSION)


def request_digest(payload: Any) -> str:
    """SHA-256, in hex, of a request as it is on the wire. It depends on the JSON alone, so that no later version of the
    model changes it; hence an omitted field differs from one set to its default. Raises `ValueError`, `RecursionError`:
    it is not JSON, or nested too deeply."""
    canonical = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
