"""`stoker submit`: options for the usual fields of a request, `--set` for the others, and the job's RQ options. Only
command-line texts. Options replace fields of a JSON file; stdin is read if neither has an input. The request is
validated elsewhere."""

import json
import sys
from contextlib import suppress
from typing import IO, Any

import click

from stoker.command_parts import (
    json_option,
    open_producer,
    redis_option,
    show,
    show_result,
    show_stream,
    timeout_option,
)
from stoker_shared.check import Check
from stoker_shared.errors import StokerError
from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.request import GenerationRequest, build_request

_INPUTS = ("prompt", "message", "prompt_file", "messages_file")
_INPUT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_OF_SCHEMAS = {
    *("type", "properties", "required", "items", "enum", "const"),
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref"),
}
"""Words of which a JSON Schema usually has at least one at its top level."""
_FILES = ("json_file", "prompt_file", "messages_file", "tools_file", "schema_file", "check_file")


def request_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The request's fields: those given as options, and the others from the file. `options` are by name, ``None`` if
    not given. Raises `click.UsageError`: two inputs or none, or a file with the wrong content."""
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    files = [given[name] for name in _FILES if name in given]
    if sum(file is sys.stdin or _name(file) == "<stdin>" for file in files) > 1:
        raise click.UsageError("stdin is read once: give - to one option only")
    fields = _json(given.pop("json_file"), dict, "one request as a JSON object") if "json_file" in given else {}
    fields |= given.pop("further", {})
    inputs = {name: given.pop(name) for name in _INPUTS if name in given}
    if len(inputs) > 1:
        raise click.UsageError("give only one of --prompt, --prompt-file, --message and --messages-file")
    if inputs:
        fields = {name: value for name, value in fields.items() if name not in _INPUT_FIELDS}
        fields |= _chosen_input(inputs)
    elif all(fields.get(name) is None for name in _INPUT_FIELDS):
        fields |= _message(_piped())
    if "tools_file" in given:
        fields["tools"] = _json(given.pop("tools_file"), list, "a JSON list of tools")
    if "check_file" in given:
        fields["check"] = read_check(given.pop("check_file"))
    if "schema_file" in given:
        schema = _json(given.pop("schema_file"), dict, "a JSON Schema as a JSON object")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return fields | given


def read_check(file: IO[str]) -> dict[str, Any]:
    """The fields of a check, from a file with such fields or with the JSON Schema of one. Raises `click.UsageError`: it
    has neither. (A schema ignores unknown words, so a misspelled condition would accept all JSON.)"""
    value: dict[str, Any] = _json(file, dict, "a check or a JSON Schema as a JSON object")
    conditions = Check.model_fields.keys()
    if value.keys() & (conditions - {"contains"}) or value.keys() == {"contains"}:  # `contains` is in JSON Schema too
        return value
    if not value.keys() & _OF_SCHEMAS:
        raise click.UsageError(
            f"{_name(file)} has no condition of a check ({', '.join(conditions)}) and is no JSON Schema"
            f" with {', '.join(sorted(_OF_SCHEMAS))}; a check takes any other schema as its json_schema"
        )
    return {"json_schema": value}


def _chosen_input(inputs: dict[str, Any]) -> dict[str, Any]:
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
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    text = _read(sys.stdin).removesuffix("\n").removesuffix("\r") if is_piped else ""
    if not text:
        missing = "no input, and stdin is empty" if is_piped else "no input"
        raise click.UsageError(
            f"{missing}: give --message, --messages-file, --prompt, --prompt-file or --json-file, or pipe a message in"
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


_text_file = click.File("r", encoding="utf-8")
_input = options_under("Input: one of these, else stdin")
_memory = options_under("Agent")
_sampling = options_under("Generation")
_form = options_under("Tools, and form of the answer")
_checked = options_under("Models and checks")
_job = options_under("Job")
_output = options_under("Output")
JOB_OPTIONS = (
    "queue", "job_id", "job_timeout_s", "result_ttl_s", "failure_ttl_s", "ttl_s", "at_front", "retry", "depends_on",
    "allow_dependency_failures", "models", "min_trust",
)  # fmt: skip


def _as_models(context: click.Context, parameter: click.Parameter, names: str | None) -> Any:
    return names.split(",") if names not in (None, "auto") else names


def _as_fields(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any] | None:
    """A value that is not JSON is a text."""
    fields: dict[str, Any] = {}
    for name, equals, value in (pair.partition("=") for pair in pairs):
        if not equals or name not in GenerationRequest.model_fields:
            raise click.BadParameter(
                f"expected a field of a request, = and its value, not {name!r}", context, parameter
            )
        try:
            fields[name] = json.loads(value)
        except (ValueError, RecursionError):
            fields[name] = value
    return fields or None


@click.command(
    cls=LaidOutCommand,
    epilog=examples(
        "stoker submit --message 'Name three rivers.' --wait",
        "stoker submit --message 'Who lives at sea?' --schema-file animal.json --wait",
        "stoker submit --agent reviewer --context append --message 'And now the tests?' --wait",
        "git diff | stoker submit --agent reviewer --context append --wait",
        "stoker submit --message 'Tell me a story.' --stream",
        "stoker submit --json-file request.json --max-tokens 50 --job-id review-17",
    ),
)
@_input("--message", metavar="TEXT", help="One chat message from the user.")
@_input("--messages-file", type=_text_file, metavar="FILE", help="A JSON list of chat messages; - reads stdin.")
@_input("--prompt", metavar="TEXT", help="A raw prompt, without a chat template.")
@_input("--prompt-file", type=_text_file, metavar="FILE", help="A file with a raw prompt; - reads stdin.")
@_input("--json-file", type=_text_file, metavar="FILE",
        help="A whole request as a JSON object; - reads stdin. Other options replace its fields.")  # fmt: skip
@_memory("--agent", "agent_id", metavar="ID", help="The agent whose memory is used and extended.  [none: no memory]")
@_memory("--session", metavar="ID", help="Keep the caches of this session's calls; no conversation is stored.")
@_memory("--context", type=click.Choice(["full", "append"]),
         help="full: the input is the whole conversation; append: it continues the agent's.  [full]")  # fmt: skip
@_memory("--expect-version", type=int, metavar="N", help="With append: fail unless the agent is at this version.")
@_memory("--must-exist", is_flag=True, default=None, help="With append: fail if there is no such agent.")
@_memory("--cache", type=click.Choice(["readwrite", "read", "off"]),
         help="read: use the memory without changing it; off: do not use it.  [readwrite]")  # fmt: skip
@_sampling("--max-tokens", type=int, metavar="N", help="Most tokens to generate.  [256]")
@_sampling("--temperature", type=float, metavar="X", help="0: always take the likeliest token.  [0.0]")
@_sampling("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens of this total probability.")
@_sampling("--top-k", type=int, metavar="N", help="Sample from the N likeliest tokens.")
@_sampling("--seed", type=int, metavar="N", help="The same seed samples the same text, as far as batching allows.")
@_sampling("--stop", multiple=True, metavar="TEXT", help="Text that ends the generation; repeatable.")
@_sampling("--max-reasoning-tokens", type=int, metavar="N", help="Most tokens of thinking.")
@_sampling("--set", "further", metavar="FIELD=JSON", multiple=True, callback=_as_fields,
           help="Any field of the request (docs/request.md), as --set n=3; repeatable.")  # fmt: skip
@_form("--schema-file", type=_text_file, metavar="FILE", help="A JSON Schema that the answer follows; - reads stdin.")
@_form("--tools-file", type=_text_file, metavar="FILE", help="A JSON list of tools; - reads stdin.")
@_job("--model", metavar="NAME", help="Only a worker that has loaded this model runs the job.")
@_checked("--models", metavar="NAMES", callback=_as_models,
          help="Models to ask, the cheapest first, as a,b; or auto: all that are served.")  # fmt: skip
@_checked("--check-file", type=_text_file, metavar="FILE",
          help="A check or a JSON Schema, as a JSON object; the next model is asked if it fails.")  # fmt: skip
@_checked("--min-trust", type=float, metavar="X",
          help="Begin with a model only if this share of its answers passes, 0 to 1.")  # fmt: skip
@_checked("--max-cost-s", type=float, metavar="S",
          help="Ask no further model once the total would exceed this many seconds.")  # fmt: skip
@_checked("--task", metavar="CLASS", help="The class of tasks under which verdicts count.")
@_job("--queue", metavar="NAME", help="RQ queue.  [generate]")
@_job("--job-id", metavar="ID", help="Your own id: repeating the command makes no second job.")
@_job("--job-timeout-s", type=int, metavar="S", help="Longest run, in seconds.  [3600]")
@_job("--result-ttl-s", type=int, metavar="S", help="How long the result is kept; -1: for ever.  [86400]")
@_job("--failure-ttl-s", type=int, metavar="S", help="How long a failed job is kept; -1: for ever.  [604800]")
@_job("--ttl-s", type=int, metavar="S", help="Longest wait in the queue; then the job is dropped.")
@_job("--at-front", is_flag=True, default=None, help="Put the job before all waiting ones.")
@_job("--retry", type=int, metavar="N", help="How often to try again if the job fails.")
@_job("--depends-on", multiple=True, metavar="ID", help="A job that has to finish first; repeatable.")
@_job("--allow-dependency-failures", is_flag=True, default=None, help="Run even if one of these has failed.")
@_output("--wait", is_flag=True, help="Wait for the job and print the text it generated.")
@_output("--stream", is_flag=True, help="Print the text as it is generated.")
@timeout_option
@json_option
@redis_option
@click.pass_obj
def submit(redis_url: str, /, wait: bool, stream: bool, timeout_s: float | None, as_json: bool, **options: Any) -> None:
    """Enqueue one job and print its id.

    Without an input option, stdin is the user's message.
    """
    if timeout_s is not None and not (wait or stream):
        raise click.UsageError("--timeout-s needs --wait or --stream")
    if stream and as_json:
        raise click.UsageError("--stream prints text and --json one JSON object; give one of them")
    job_options = {name: options.pop(name) for name in JOB_OPTIONS}
    fields = request_fields(options)
    build_request(fields)  # before `submit`, because a file could otherwise give it job options
    with open_producer(redis_url) as producer:
        given = {name: value for name, value in job_options.items() if value is not None}
        ticket = producer.submit(**fields, **given, stream=stream)  # logs to stderr when no worker listens
        if not (wait or stream):
            queue = fields["route"][0]["queue"] if fields.get("route") else job_options["queue"]
            warning = None
            if as_json and job_options["models"] is None:  # of `models`, a live worker serves each
                with suppress(StokerError):  # the job is enqueued already
                    warning = producer.unattended(queue)
            show(as_json, {"job_id": ticket.job_id} | ({"warning": warning} if warning else {}), ticket.job_id)
            return
        if not as_json:
            click.echo(f"job {ticket.job_id}", err=True)
        if stream:
            show_stream(ticket, timeout_s)
        else:
            show_result(ticket, timeout_s, as_json)
