"""A generation request. Owns validation and the version rule; does no I/O.

Both sides use this model: the producer refuses a bad request before it is enqueued; the worker refuses, with the same
message, a bad request from any other client (plain RQ, redis-cli, another language).
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stoker_shared.errors import InvalidRequest, RequestTooLarge, RequestVersionTooNew
from stoker_shared.sdk_message import plain_message
from stoker_shared.wire import MAX_REQUEST_BYTES, REQUEST_VERSION

RequestT = TypeVar("RequestT", bound=BaseModel)
_FREE_FORM_FIELDS = ("messages", "tools", "chat_template_kwargs", "metadata")
_MAX_PROBLEMS_SHOWN = 8
_JOINERS = "\u200c\u200d"  # zero-width joiners are format characters, yet half of all emoji are built with them


def _printable(value: str) -> str:
    for character in value:
        if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and character not in _JOINERS:
            raise ValueError(f"must hold printable characters only, found {character!r}")
    return value


def _as_tuple(value: object) -> object:
    """JSON has only lists, and OpenAI's `stop` may be a single string."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Access = Literal["write", "read", "none"]
"""How a job uses its agent's memory. `write`: the agent's writing jobs run one at a time, in order. `read`: beside
other readers, after the writes enqueued before it and before those enqueued after it. `none`: no order: the job has no
agent, or does not touch the memory."""

AgentId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
"""1 to 200 printable characters, also ``../``, emoji and spaces; never used as a path as it is."""


class Message(BaseModel):
    """One chat message; `sdk_message` brings the forms that SDKs send into this one.

    Attributes:
        content: ``None`` only beside `tool_calls`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_as_tuple)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_kept(cls, fields: Any) -> Any:
        return plain_message(fields)

    @model_validator(mode="after")
    def _has_content_or_calls(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("'content' must be given, unless the message has 'tool_calls'")
        return self

    def is_exactly(self, other: "Message") -> bool:
        """Whether both have the same JSON; ``==`` equates 1, 1.0 and True in tool calls, but chat templates do not."""
        if self is other:
            return True
        ours, theirs = ((x.role, x.content, x.name, x.tool_call_id) for x in (self, other))
        return ours == theirs and json.dumps(self.tool_calls) == json.dumps(other.tool_calls)

    def as_template_input(self) -> dict[str, Any]:
        """The message as a plain dict without the fields that were not set."""
        return self.model_dump(exclude_none=True, mode="json")


class GenerationRequest(BaseModel):
    """One generation job.

    Frozen; unknown fields are refused, so a new field needs a new `v`. Names and ranges are OpenAI's and mlx-lm's. The
    README explains each field, ``docs/lifecycle.md`` the job's life.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    v: Annotated[int, Field(ge=1)] = 1
    agent_id: AgentId | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[tuple[Message, ...], BeforeValidator(_as_tuple)] | None = None
    context: Literal["full", "append"] = "full"
    expect_version: Annotated[int, Field(ge=0)] | None = None
    must_exist: bool = False
    cache: Literal["readwrite", "read", "off"] = "readwrite"
    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=16), BeforeValidator(_as_tuple)
    ] = ()
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_as_tuple)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' must be given")
        if self.messages == ():
            raise ValueError("'messages' must hold at least one message")
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
        if any(len(key) > 64 or len(value) > 512 for key, value in self.metadata.items()):
            raise ValueError("'metadata' keys are at most 64 characters and values at most 512")
        for field in _FREE_FORM_FIELDS:
            if not _is_plain_json(getattr(self, field)):
                raise ValueError(f"'{field}' must be plain JSON: no NaN, no lone surrogates, no other Python objects")
        return self

    @property
    def access(self) -> "Access":
        """How the job uses its agent's memory, which decides for which of the agent's other jobs it waits."""
        if self.agent_id is None or self.cache == "off":
            return "none"
        return "read" if self.cache == "read" else "write"

    def as_payload(self) -> dict[str, Any]:
        """The JSON object that goes on the wire: the fields that differ from their defaults, and the lowest `v` that
        has all of them.

        Raises:
            RequestTooLarge: it is over ``MAX_REQUEST_BYTES`` as UTF-8 JSON.
            InvalidRequest: a value is nested too deeply to be written.
        """
        try:
            fields = self.model_dump(mode="json", exclude_defaults=True, exclude={"v"})
        except ValueError:  # pydantic's message could quote the value
            raise InvalidRequest("the request cannot be written as JSON: a value is nested too deeply") from None
        payload = {"v": self._lowest_version(), **fields}
        size = len(json.dumps(payload, ensure_ascii=False).encode())
        if size > MAX_REQUEST_BYTES:
            raise RequestTooLarge(f"the request is {size} bytes of JSON, the limit is {MAX_REQUEST_BYTES}")
        return payload

    def _lowest_version(self) -> int:
        is_of_v2 = self.agent_id is None or self.expect_version is not None or self.must_exist
        has_silent_message = any(message.content is None for message in self.messages or ())
        return 2 if is_of_v2 or has_silent_message else 1


def build_request(fields: Mapping[str, Any]) -> GenerationRequest:
    """Validate the fields of one request.

    Raises:
        RequestVersionTooNew: `v` is above ``REQUEST_VERSION``.
        InvalidRequest: anything else; the message names each bad field.
    """
    return validated(GenerationRequest, fields, newest_version=REQUEST_VERSION)


def validated(model: type[RequestT], fields: Mapping[str, Any], *, newest_version: int) -> RequestT:
    """A request of this model; `newest_version` is the largest `v` that this code reads.

    Raises:
        RequestVersionTooNew, InvalidRequest: as `build_request`.
    """
    version = fields.get("v", 1)
    if isinstance(version, int) and version > newest_version:
        raise RequestVersionTooNew(f"the request has v {version}, this side reads up to v {newest_version}: update it")
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        raise InvalidRequest(_problems_of(error)) from None


def request_digest(payload: Any) -> str:
    """SHA-256, in hex, of a request as it is on the wire. It depends on the JSON alone, so that no later version of the
    model changes it; a field that is omitted therefore differs from one that is given its default.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    canonical = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _problems_of(error: ValidationError) -> str:
    """One line with each problem as `field: message`, without the input: errors must not quote prompts."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(_shown(part) for part in problem["loc"])
        unknown = problem["type"] == "extra_forbidden"
        message = "there is no such field" if unknown else problem["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {message}" if field else message)
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        problems[_MAX_PROBLEMS_SHOWN:] = [f"and {len(problems) - _MAX_PROBLEMS_SHOWN} more"]
    return "; ".join(problems)


def _shown(name: int | str) -> str:
    """A field's name, fit for one short line: an unknown field may have any name."""
    text = str(name)
    return (text if text.isprintable() else ascii(text))[:64]


def _is_plain_json(value: object) -> bool:
    """Whether the value can be UTF-8 JSON: pydantic checks neither `Any` nor surrogates in `str`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=_message_fields).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _message_fields(value: object) -> dict[str, Any]:
    if not isinstance(value, Message):
        raise TypeError
    return dict(value)
