"""`stoker submit`: an option for every field of a request and for the job's options in RQ. Only command-line texts.

The input is options over a JSON file over stdin; the request is validated elsewhere.
"""

import json
import sys
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
from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.request import build_request

_INPUTS = ("prompt", "message", "prompt_file", "messages_file")
_INPUT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_OF_SCHEMAS = {
    *("type", "properties", "required", "items", "enum", "const"),
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref"),
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
        fields = {name: value for name, value in fields.items() if name not in _INPUT_FIELDS}
        fields |= _chosen_input(inputs)
    elif all(fields.get(name) is None for name in _INPUT_FIELDS):
        fields |= _message(_piped())
    if "tools_file" in given:
        fields["tools"] = _json(given.pop("tools_file"), list, "a JSON list of tools")
    if "check_file" in given:
        fields["check"] = read_check(given.pop("check_file"))
    return fields | _form_fields(given) | given


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


def _form_fields(given: dict[str, Any]) -> dict[str, Any]:
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
_form = options_under("Form of the answer")
_template = options_under("Chat template")
_checked = options_under("Models and checks")
_job = options_under("Job")
_output = options_under("Output")
JOB_OPTIONS = (
    "queue", "job_id", "job_timeout_s", "result_ttl_s", "failure_ttl_s", "ttl_s", "at_front", "retry", "depends_on",
    "allow_dependency_failures", "models", "min_trust",
)  # fmt: skip


def _as_object(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        value = text
    if text is not None and not isinstance(value, dict):
        raise click.BadParameter("expected a JSON object", context, parameter)
    return value


def _as_models(context: click.Context, parameter: click.Parameter, names: str | None) -> Any:
    return names.split(",") if names not in (None, "auto") else names


def _as_map(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in fields:
            raise click.BadParameter(f"expected KEY=VALUE, each key once, not {pair!r}", context, parameter)
        fields[key] = value
    return fields or None


def _as_biases(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, float] | None:
    try:
        return {key: float(bias) for key, bias in (_as_map(context, parameter, pairs) or {}).items()} or None
    except ValueError:
        raise click.BadParameter("expected ID=NUMBER", context, parameter) from None


def _as_tool_choice(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value in (None, "auto", "none", "required"):
        return value
    return {"type": "function", "function": {"name": value}}


def _as_response_format(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    return {"type": value} if value in ("text", "json_object") else _as_object(context, parameter, value)


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
@_memory("--cache-salt", metavar="TEXT", help="Share cached prefixes only with jobs of this salt.")
@_sampling("--max-tokens", type=int, metavar="N", help="Most tokens to generate.  [256]")
@_sampling("--fit-max-tokens", is_flag=True, default=None, help="Lower --max-tokens to what fits behind the prompt.")
@_sampling("--min-tokens", type=int, metavar="N", help="Nothing ends the answer before so many tokens.")
@_sampling("--temperature", type=float, metavar="X", help="0: always take the likeliest token.  [0.0]")
@_sampling("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens of this total probability.")
@_sampling("--top-k", type=int, metavar="N", help="Sample from the N likeliest tokens.")
@_sampling("--min-p", type=float, metavar="X", help="Skip tokens less likely than X times the likeliest one.")
@_sampling("--seed", type=int, metavar="N", help="The same seed samples the same text, as far as batching allows.")
@_sampling("--stop", multiple=True, metavar="TEXT", help="Text that ends the generation; repeatable.")
@_sampling("--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID",
           help="Token that ends the generation; repeatable.")  # fmt: skip
@_sampling(
    "--ignore-eos", is_flag=True, default=None, help="The model's end-of-sequence token does not end the answer."
)
@_sampling("--repetition-penalty", type=float, metavar="X", help="Above 1: tokens used before become less likely.")
@_sampling("--presence-penalty", type=float, metavar="X",
           help="-2 to 2; above 0: tokens that the answer has become less likely.")  # fmt: skip
@_sampling("--frequency-penalty", type=float, metavar="X",
           help="-2 to 2; above 0: the more often the answer has a token, the less likely it becomes.")  # fmt: skip
@_sampling("--logit-bias", multiple=True, metavar="ID=X", callback=_as_biases,
           help="Added to a token's logit, -100 to 100; repeatable.")  # fmt: skip
@_sampling("--n", type=int, metavar="N", help="So many answers; not for a turn that an agent remembers.")
@_sampling("--logprobs", is_flag=True, default=None, help="Put each token's log-probability into the result.")
@_sampling("--top-logprobs", type=int, metavar="N", help="With --logprobs: also those of the N likeliest tokens.")
@_sampling("--prompt-logprobs", type=int, metavar="N",
           help="Also the prompt's log-probabilities, with those of the N likeliest tokens.")  # fmt: skip
@_sampling("--prompt-logprobs-start", type=int, metavar="N", help="From the prompt's Nth token on, counted from 0.")
@_sampling("--return-prompt", is_flag=True, default=None, help="Put the prompt's text and token ids into the result.")
@_sampling("--max-reasoning-tokens", type=int, metavar="N", help="Most tokens of thinking.")
@_form("--response-format", metavar="FORM", callback=_as_response_format,
       help="json_object, text, or OpenAI's response_format as a JSON object.")  # fmt: skip
@_form("--schema-file", type=_text_file, metavar="FILE", help="A JSON Schema that the answer follows; - reads stdin.")
@_form("--guide-regex", metavar="REGEX", help="The whole answer matches it.")
@_form("--guide-choice", multiple=True, metavar="TEXT", help="The answer is one of these; repeatable.")
@_form("--guide-lark-file", type=_text_file, metavar="FILE",
       help="A Lark grammar that the answer follows; - reads stdin.")  # fmt: skip
@_template("--tools-file", type=_text_file, metavar="FILE", help="A JSON list of tools; - reads stdin.")
@_template("--tool-choice", metavar="CHOICE", callback=_as_tool_choice,
           help="auto, none, required, or the name of the tool to call.")  # fmt: skip
@_template("--parallel-tool-calls/--no-parallel-tool-calls", default=None, help="More than one call, or at most one.")
@_template(
    "--chat-template-kwargs", metavar="JSON", callback=_as_object, help="""For example '{"enable_thinking": false}'."""
)
@_job("--model", metavar="NAME", help="Only a worker that has loaded this model runs the job.")
@_checked("--models", metavar="NAMES", callback=_as_models,
          help="Models to ask, the cheapest first, as a,b; or auto: all that are served.")  # fmt: skip
@_checked("--check-file", type=_text_file, metavar="FILE",
          help="A check or a JSON Schema, as a JSON object; the next model is asked if it fails.")  # fmt: skip
@_checked("--min-trust", type=float, metavar="X",
          help="Begin with a model only if this share of its answers passes, 0 to 1.")  # fmt: skip
@_checked("--max-cost-s", type=float, metavar="S",
          help="Ask no further model if that would take more seconds in all.")  # fmt: skip
@_checked("--task", metavar="CLASS", help="The class of tasks under which verdicts count.")
@_job("--metadata", multiple=True, metavar="K=V", callback=_as_map, help="Returned with the result; repeatable.")
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
    build_request(fields)  # before `submit`, to which a file could otherwise give job options
    with open_producer(redis_url) as producer:
        given = {name: value for name, value in job_options.items() if value is not None}
        ticket = producer.submit(**fields, **given, stream=stream)  # logs to stderr when no worker listens
        if not (wait or stream):
            warning = producer.unattended(job_options["queue"]) if as_json else None
            show(as_json, {"job_id": ticket.job_id} | ({"warning": warning} if warning else {}), ticket.job_id)
            return
        if not as_json:
            click.echo(f"job {ticket.job_id}", err=True)
        if stream:
            show_stream(ticket, timeout_s)
        else:
            show_result(ticket, timeout_s, as_json)
