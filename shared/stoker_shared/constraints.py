"""The parts of a request that constrain an answer's form: tools to call, a JSON schema, a grammar. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST_CHOICES: Final = 1024
"""Most strings of a `Guide.choice`."""

_FORM = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, serialize_by_alias=True)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class NamedFunction(BaseModel):
    model_config = _FORM

    name: Annotated[str, Field(min_length=1)]


class NamedTool(BaseModel):
    """OpenAI's form of `tool_choice` for one tool: it must be called."""

    model_config = _FORM

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool
"""`auto`: the model decides; `none`: no tool is called; `required`: one is called."""


class JsonSchema(BaseModel):
    """OpenAI's form.

    Attributes:
        schema_: the JSON Schema, `schema` in JSON.
        strict: as at OpenAI, whether the answer must follow the schema. It always does here.
    """

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
    """The language of the answer: exactly one field is set.

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
