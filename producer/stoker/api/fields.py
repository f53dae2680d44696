"""Rules for the fields of request bodies, and the options that apply to all bodies. Pure.

A field is copied as it is, becomes another field, is ignored because it does not change the answer, or is refused by
name. A field that is ``null`` counts as omitted.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from stoker.api.failure import FieldRefused
from stoker_shared.text import printable


@dataclass(frozen=True)
class BodyOptions:
    """The options that apply to all bodies.

    Attributes:
        model_aliases: from the model's name in a body to the name of the loaded model.
        any_model: run every body on the loaded model, even if it names another.
        max_tokens: for bodies without a limit; ``None`` for the default of their API.
        ignore_unknown: drop unknown fields, with a line in the log, instead of refusing them.
    """

    model_aliases: Mapping[str, str] = field(default_factory=dict)
    any_model: bool = False
    max_tokens: int | None = None
    ignore_unknown: bool = False


Rule = Callable[[dict[str, Any], Any, BodyOptions], None]
"""Writes a body's value into the request's fields, or raises `FieldRefused`."""

T = TypeVar("T")
_KINDS: Final[Mapping[type[Any], str]] = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}


def checked(name: str, value: Any, kind: type[T]) -> T:
    """The field's value. Raises `FieldRefused`: it is not of this kind."""
    if not isinstance(value, kind):
        raise FieldRefused(name, f"is not {_KINDS[kind]}", "invalid_value")
    return value


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
_MOST_SESSION_CHARACTERS: Final = 200
_MOST_SALT_CHARACTERS: Final = 200
_MOST_TOKENS: Final = 10_000_000
_NOT_SET: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_k": (-1, 0),
    "seed": (-1,),
    "user": ("",),
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "max_output_tokens": (-1,),
    "prompt_cache_key": ("",),
    "reasoning_effort": ("none",),
}
"""Values that clients send for "not set"."""

_INSTEAD: Final[Mapping[str, str]] = {
    **dict.fromkeys(("guided_json", "structured_outputs"), "give 'response_format'"),
    **dict.fromkeys(("guided_choice", "guided_regex", "guided_grammar"), "give 'guide'"),
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"), "give 'max_tokens'"),
    "repeat_penalty": "give 'repetition_penalty'",
    **dict.fromkeys(("enable_thinking", "thinking", "think"), "give 'chat_template_kwargs'"),
    "reasoning_effort": "give 'chat_template_kwargs'",
    "num_ctx": "a worker has the whole context of its model",
    "cache_prompt": "give 'cache'",
    "priority": "calls of higher priority have a queue of their own",
    "expires_after": "files stay until they are deleted",
}
"""The right names for fields of other servers."""

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_MOST_LOGGED: Final = 100


def apply_rules(
    rules: Mapping[str, Rule], url: str, body: Mapping[str, Any], fields: dict[str, Any], options: BodyOptions
) -> None:
    """Write a body into the fields of a `GenerationRequest`; `build_request` checks their ranges. Raises
    `FieldRefused`: a field is unknown or cannot be served."""
    for name, value in body.items():
        if name not in rules:
            drop_unknown(name, url, options)
        elif value is not None and not _is_unset(name, value):
            rules[name](fields, value, options)
    if body.get("model") is None and not options.any_model:
        raise FieldRefused("model", "is missing", "missing_required_parameter")


def _is_unset(name: str, value: Any) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in _NOT_SET.get(name, ()))


def drop_unknown(name: str, url: str, options: BodyOptions) -> None:
    """Raises `FieldRefused` unless unknown fields are dropped."""
    name = name[:_NAME_CHARACTERS]
    if not options.ignore_unknown:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise FieldRefused(name, f"is not a known field of {url}{instead}", "unknown_parameter")
    if name not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(name)
        _log.warning("the field %r of calls of %s is ignored", name, url)


def model_rule(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    name = checked("model", value, str)
    if not options.any_model:
        fields["model"] = options.model_aliases.get(name, name)


def limit(name: str) -> dict[str, Rule]:
    """The rule of a field that limits the answer's tokens; several of them must agree."""

    def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
        if fields.setdefault("max_tokens", value) != value:
            raise FieldRefused(name, "differs from the other limit", "invalid_value")

    return {name: apply}


def default_limit(fields: dict[str, Any], options: BodyOptions, max_tokens: int | None = None) -> None:
    """The limit of a body without one: the options', else `max_tokens`, and at most what the context leaves."""
    if "max_tokens" not in fields:
        fields["max_tokens"] = options.max_tokens or max_tokens or _MOST_TOKENS
        fields["fit_max_tokens"] = True


def template_kwargs(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """The rule of `chat_template_kwargs`, which take precedence over values that follow from other fields."""
    known = fields.get("chat_template_kwargs", {})
    fields["chat_template_kwargs"] = {**known, **value} if isinstance(value, dict) else value


def for_template(fields: dict[str, Any], **values: Any) -> None:
    """Values for the chat template that follow from other fields; `chat_template_kwargs` takes precedence."""
    known = fields.get("chat_template_kwargs", {})
    if isinstance(known, dict):
        fields["chat_template_kwargs"] = {**values, **known}


def reasoning_effort(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    """The rule of an effort of thinking: the template gets it, unless it is ``none``."""
    if checked("reasoning_effort", value, str) != "none":
        for_template(fields, reasoning_effort=value)


def session(*names: str) -> dict[str, Rule]:
    """The rules of fields that name the session of a call; the first one in the body counts."""

    def rule(name: str) -> Rule:
        def apply(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
            fields.setdefault("session", session_name(checked(name, value, str)))

        return apply

    return {name: rule(name) for name in names}


def session_name(text: str) -> str:
    """A session name for any text; a digest of text that a request would refuse."""
    is_taken = len(text) <= _MOST_SESSION_CHARACTERS and printable(text) == text
    return text if is_taken else hashlib.sha256(text.encode(errors="replace")).hexdigest()


def settle_memory(fields: dict[str, Any]) -> None:
    """A session becomes an agent if the call continues a conversation; a named agent takes precedence."""
    if "session" not in fields:
        return
    is_continued = fields.get("context") == "append" or fields.get("expect_version") is not None
    if "agent_id" not in fields and (is_continued or fields.get("must_exist")):
        fields["agent_id"] = fields["session"]
    if "agent_id" in fields:
        del fields["session"]


def keep_apart(fields: dict[str, Any], name: str) -> None:
    """Make a call share caches only with calls of the same token's name. Agents' caches are open to all names, but an
    agent's call cannot use the caches of a name, whatever salt it gives."""
    salt = fields.get("cache_salt", "")
    if not isinstance(salt, str):
        return  # it is refused
    if "agent_id" in fields:
        if " " not in salt:
            return
        name = ""  # of nobody
    if len(name) + 1 + len(salt) > _MOST_SALT_CHARACTERS:
        salt = hashlib.sha256(salt.encode(errors="replace")).hexdigest()
    fields["cache_salt"] = f"{name} {salt}"
