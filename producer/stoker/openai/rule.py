"""One rule for one field of a request body: served, mapped or refused. Pure; `fields` has the rules themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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


def copied_unless(name: str, default: Any, note: str) -> dict[str, Rule]:
    """As `copied`, but a value that changes nothing is left out, so that workers of earlier releases take the job."""

    def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if value != default or isinstance(value, bool) != isinstance(default, bool):
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
