"""The check that an answer has to pass, as a job carries it. Pure; `checking` evaluates it."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from stoker_shared.message import as_tuple
from stoker_shared.pattern import NoPattern, require_pattern
from stoker_shared.result import FinishReason

_Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=64, fail_fast=True), BeforeValidator(as_tuple)
]


class Check(BaseModel):
    """An answer is accepted if all that is set here holds. Texts are looked for in the answer without thinking and
    without tool calls.

    Attributes:
        json_schema: the answer is JSON that is valid for this schema (2020-12; `format` is not checked, and a `$ref`
            stays within the schema).
        regex: a pattern in Rust's dialect that is found somewhere in the answer; ``^(?:...)$`` for the whole of it.
        contains, forbids: texts that are in the answer, or not.
        min_mean_logprob: the least mean log-probability of the answer's tokens, 0 or below; needs `logprobs`.
        finish_reason: the accepted ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    json_schema: dict[str, Any] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    contains: _Texts = ()
    forbids: _Texts = ()
    min_mean_logprob: Annotated[float, Field(le=0.0)] | None = None
    finish_reason: Annotated[
        tuple[FinishReason, ...], Field(max_length=8, fail_fast=True), BeforeValidator(as_tuple)
    ] = ()

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not any(value is not None and value != () for value in dict(self).values()):
            raise ValueError("at least one condition must be given")
        if self.regex is not None:
            try:
                require_pattern(self.regex)
            except NoPattern as error:
                raise ValueError(f"'regex' cannot be read: {error}") from None
        return self
