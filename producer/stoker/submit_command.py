"""`stoker submit`: an option for every field of a request, and for how RQ keeps the job. Words only."""

import json
from typing import Any

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
from stoker.submit_input import request_fields
from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.request import build_request

_text_file = click.File("r", encoding="utf-8")
_input = options_under("Input: one of these, else stdin")
_memory = options_under("Agent")
_sampling = options_under("Generation")
_template = options_under("Chat template")
_job = options_under("Job")
_output = options_under("Output")
JOB_OPTIONS = (
    "queue", "job_id", "job_timeout_s", "result_ttl_s", "failure_ttl_s", "ttl_s", "at_front", "retry", "depends_on",
    "allow_dependency_failures",
)  # fmt: skip


def _as_object(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        value = text
    if text is not None and not isinstance(value, dict):
        raise click.BadParameter("expected a JSON object", context, parameter)
    return value


def _as_map(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in fields:
            raise click.BadParameter(f"expected KEY=VALUE, each key once, not {pair!r}", context, parameter)
        fields[key] = value
    return fields or None


@click.command(
    cls=LaidOutCommand,
    epilog=examples(
        "stoker submit --message 'Name three rivers.' --wait",
        "stoker submit --agent reviewer --context append --message 'And now the tests?' --wait",
        "git diff | stoker submit --agent reviewer --context append --wait",
        "stoker submit --message 'Tell me a story.' --stream",
        "stoker submit --json-file request.json --max-tokens 50 --job-id review-17",
    ),
)
@_input("--message", metavar="TEXT", help="One chat message from the user.")
@_input("--messages-file", type=_text_file, metavar="FILE", help="A JSON list of chat messages; - reads stdin.")
@_input("--prompt", metavar="TEXT", help="The prompt itself, read by the model as it is.")
@_input("--prompt-file", type=_text_file, metavar="FILE", help="The prompt, taken as it is; - reads stdin.")
@_input(
    "--json-file",
    type=_text_file,
    metavar="FILE",
    help="A whole request as a JSON object; - reads stdin. Each option beside it replaces that field.",
)
@_memory("--agent", "agent_id", metavar="ID", help="Whose memory the job uses and extends.  [none: no memory]")
@_memory(
    "--context",
    type=click.Choice(["full", "append"]),
    help="full: the input is the whole conversation; append: it continues the agent's.  [full]",
)
@_memory("--expect-version", type=int, metavar="N", help="With append: fail unless the agent is at this version.")
@_memory("--must-exist", is_flag=True, default=None, help="With append: fail if there is no such agent.")
@_memory(
    "--cache",
    type=click.Choice(["readwrite", "read", "off"]),
    help="read: use the memory, leave it as it is; off: neither.  [readwrite]",
)
@_memory("--cache-salt", metavar="TEXT", help="Share cached prefixes only with jobs of this salt.")
@_sampling("--max-tokens", type=int, metavar="N", help="Most tokens to generate.  [256]")
@_sampling("--temperature", type=float, metavar="X", help="0: always the likeliest token.  [0.0]")
@_sampling("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens of this total probability.")
@_sampling("--top-k", type=int, metavar="N", help="Sample from so many of the likeliest tokens.")
@_sampling("--min-p", type=float, metavar="X", help="Leave out tokens below this share of the likeliest one's.")
@_sampling("--seed", type=int, metavar="N", help="The same seed samples the same text, as far as the batch allows.")
@_sampling("--stop", multiple=True, metavar="TEXT", help="Text that ends the generation; may be given several times.")
@_sampling("--repetition-penalty", type=float, metavar="X", help="Above 1: tokens that were used are less likely.")
@_sampling("--logprobs", is_flag=True, default=None, help="The result holds each token's log-probability.")
@_sampling("--top-logprobs", type=int, metavar="N", help="And those of so many others at each place.")
@_template("--tools-file", type=_text_file, metavar="FILE", help="A JSON list of tools; - reads stdin.")
@_template(
    "--chat-template-kwargs", metavar="JSON", callback=_as_object, help="""Such as '{"enable_thinking": false}'."""
)
@_job("--model", metavar="NAME", help="Fail unless this is the model that the worker has loaded.")
@_job("--metadata", multiple=True, metavar="K=V", callback=_as_map, help="Comes back with the result; several times.")
@_job("--queue", metavar="NAME", help="RQ queue.  [generate]")
@_job("--job-id", metavar="ID", help="Your own id: the same command again makes no second job.")
@_job("--job-timeout-s", type=int, metavar="S", help="Longest run.  [3600]")
@_job("--result-ttl-s", type=int, metavar="S", help="How long the result is kept; -1: for ever.  [86400]")
@_job("--failure-ttl-s", type=int, metavar="S", help="How long a failed job is kept; -1: for ever.  [604800]")
@_job("--ttl-s", type=int, metavar="S", help="Longest wait in the queue; then the job is dropped.")
@_job("--at-front", is_flag=True, default=None, help="Before all that waits.")
@_job("--retry", type=int, metavar="N", help="How often a job that fails is tried again.")
@_job("--depends-on", multiple=True, metavar="ID", help="A job that has to finish first; may be given several times.")
@_job("--allow-dependency-failures", is_flag=True, default=None, help="Run also when one of these has failed.")
@_output("--wait", is_flag=True, help="Wait for the job and print what it generated.")
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
    build_request(fields)  # there may be anything in a file
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
