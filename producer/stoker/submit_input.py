"""The input of `stoker submit`: options over a JSON file over stdin. Reads it, but does not validate the request."""

import json
import sys
from typing import IO, Any

import click

from stoker_shared.check import Check

_INPUTS = ("prompt", "message", "prompt_file", "messages_file")
_OF_SCHEMAS = {
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$ref",
}
"""Words of which a JSON Schema has at least one at its top, as a rule."""
_FILES = ("json_file", "prompt_file", "messages_file", "tools_file", "schema_file", "guide_lark_file", "check_file")


def request_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The request's fields: those that were given as options, and the others from the file.

    Args:
        options: by name, ``None`` if not given; files are read, and the `guide_` options become one field.

    Raises:
        click.UsageError: two inputs or none, or a file with the wrong content.
    """
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    files = [given[name] for name in _FILES if name in given]
    if sum(file is sys.stdin or _name(file) == "<stdin>" for file in files) > 1:
        raise click.UsageError("stdin is read once: give - to one option only")
    fields = _json(given.pop("json_file"), dict, "one request as a JSON object") if "json_file" in given else {}
    inputs = {name: given.pop(name) for name in _INPUTS if name in given}
    if len(inputs) > 1:
        raise click.UsageError("give only one of --prompt, --prompt-file, --message and --messages-file")
    if inputs:
        fields = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
        fields |= _input(inputs)
    elif fields.get("prompt") is None and fields.get("messages") is None:
        fields |= _message(_piped())
    if "tools_file" in given:
        fields["tools"] = _json(given.pop("tools_file"), list, "a JSON list of tools")
    if "check_file" in given:
        fields["check"] = read_check(given.pop("check_file"))
    return fields | _form(given) | given


def read_check(file: IO[str]) -> dict[str, Any]:
    """The fields of a check, from a file that has such fields, or the JSON Schema of one.

    Raises:
        click.UsageError: it has neither. A schema ignores words that it does not know, so a condition that is
            misspelled would accept all JSON.
    """
    value: dict[str, Any] = _json(file, dict, "a check or a JSON Schema as a JSON object")
    conditions = Check.model_fields.keys()
    if value.keys() & (conditions - {"contains"}) or value.keys() == {"contains"}:  # a word of JSON Schema as well
        return value
    if not value.keys() & _OF_SCHEMAS:
        raise click.UsageError(
            f"{_name(file)} has no condition of a check ({', '.join(conditions)}) and is no JSON Schema"
            f" with {', '.join(sorted(_OF_SCHEMAS))}; a check takes any other schema as its json_schema"
        )
    return {"json_schema": value}


def _form(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the answer's form; their options are taken out of `given`."""
    fields: dict[str, Any] = {}
    if "schema_file" in given:
        if "response_format" in given:
            raise click.UsageError("give only one of --response-format and --schema-file")
        schema = _json(given.pop("schema_file"), dict, "a JSON Schema as a JSON object")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    guide = {name: given.pop(f"guide_{name}") for name in ("regex", "choice") if f"guide_{name}" in given}
    if "guide_lark_file" in given:
        guide["lark"] = _read(given.pop("guide_lark_file"))
    return fields | ({"guide": guide} if guide else {})


def _input(inputs: dict[str, Any]) -> dict[str, Any]:
    [(name, value)] = inputs.items()
    match name:
        case "prompt":
            return {"prompt": value}
        case "prompt_file":
            return {"prompt": _read(value)}
        case "message":
            return _message(value)
        case _:
            return {"messages": _json(value, list, "a JSON list of messages with role and content")}


def _message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _piped() -> str:
    """The text on stdin, without the line end that `echo` appends."""
    text = "" if sys.stdin is None or sys.stdin.isatty() else _read(sys.stdin).removesuffix("\n").removesuffix("\r")
    if not text:
        raise click.UsageError(
            "no input: give --message, --messages-file, --prompt, --prompt-file or --json-file, or pipe a message in"
        )
    return text


def _json(file: IO[str], kind: type, expected: str) -> Any:
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise click.UsageError(f"{_name(file)}: expected {expected}")
    return value


def _read(file: IO[str]) -> str:
    try:
        return file.read()
    except UnicodeDecodeError:
        raise click.UsageError(f"{_name(file)} is not UTF-8 text") from None


def _name(file: IO[str]) -> str:
    return str(getattr(file, "name", "<stdin>"))
