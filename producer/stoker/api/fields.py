"""Rules for the fields of request bodies, and the options that apply to all bodies. Pure.

A field is copied as it is, becomes another field, is ignored because it does not change the answer, or is refused by
name. A field that is ``null`` counts as omitted.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stoker.api.failure import FieldRefused


@dataclass(frozen=True)
class BodyOptions:
    """The options that apply to all bodies.

    Attributes:
        model_aliases: from the model's name in a body to the name of the loaded model.
        any_model: run every body on the loaded model, even if it names another.
        max_tokens: for bodies without a limit; ``None`` for the default of their API.
    """

    model_aliases: Mapping[str, str] = field(default_factory=dict)
    any_model: bool = False
    max_tokens: int | None = None


Rule = Callable[[dict[str, Any], Any, BodyOptions], None]
"""Writes a body's value into the request's fields, or raises `FieldRefused`."""


def copied(*names: str) -> dict[str, Rule]:
    """The request has fields of these names and meanings."""

    def copy(name: str) -> Rule:
        return lambda fields, value, options: fields.update({name: value})

    return {name: copy(name) for name in names}


def ignored(*names: str) -> dict[str, Rule]:
    """These fields do not change the answer."""
    return dict.fromkeys(names, lambda fields, value, options: None)


def only(name: str, *values: Any) -> dict[str, Rule]:
    """Accepts only the values that change nothing, and refuses all others."""

    def check(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
            unless = f" unless it is {' or '.join(map(json.dumps, values))}" if values else ""
            raise FieldRefused(name, f"is not served{unless}")

    return {name: check}


_NAME_CHARACTERS: Final = 64


def apply_rules(
    rules: Mapping[str, Rule], url: str, body: Mapping[str, Any], fields: dict[str, Any], options: BodyOptions
) -> None:
    """Write a body into the fields of a `GenerationRequest`; `build_request` checks their ranges.

    Raises:
        FieldRefused: a field is unknown or cannot be served.
    """
    for name, value in body.items():
        if name not in rules:
            raise FieldRefused(name[:_NAME_CHARACTERS], f"is not a known field of {url}", "unknown_parameter")
        if value is not None:
            rules[name](fields, value, options)
    if body.get("model") is None and not options.any_model:
        raise FieldRefused("model", "is missing", "missing_required_parameter")


def model_rule(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """The rule of `model`."""
    if not isinstance(value, str):
        raise FieldRefused("model", "is not a string", "invalid_value")
    if not options.any_model:
        fields["model"] = options.model_aliases.get(value, value)


def limit(name: str) -> dict[str, Rule]:
    """The rule of a field that limits the answer's tokens; several of them must agree."""

    def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if fields.setdefault("max_tokens", value) != value:
            raise FieldRefused(name, "differs from the other limit", "invalid_value")

    return {name: apply}


def default_limit(fields: dict[str, Any], options: BodyOptions, max_tokens: int) -> None:
    """Limit an answer whose body has no limit."""
    fields.setdefault("max_tokens", options.max_tokens or max_tokens)


def template_kwargs(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """The rule of `chat_template_kwargs`, which win over those that follow from other fields."""
    known = fields.get("chat_template_kwargs", {})
    fields["chat_template_kwargs"] = {**known, **value} if isinstance(value, dict) else value


def reasoning_effort(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """The rule of an effort of thinking: the template gets it. ``none`` sets nothing."""
    if not isinstance(value, str):
        raise FieldRefused("reasoning_effort", "is not a string", "invalid_value")
    known = fields.get("chat_template_kwargs", {})
    if value != "none" and isinstance(known, dict):
        fields["chat_template_kwargs"] = {"reasoning_effort": value, **known}
