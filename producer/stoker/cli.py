"""The `stoker` command: jobs, files of jobs, agents' memory, queues and workers. Only command-line texts.

With ``--json``, stdout is exactly one JSON object, also for an error: ``{"error": {"type": …, "message": …}}``.
Without it, stdout has the command's output, such as a job's text or id, and stderr has messages. Exit codes: 0: done;
1: the job failed, was canceled, was not found or did not finish in time, the agent is unknown, Redis is away, or
another error; 2: the command or the request is wrong; 130: interrupted.
"""

import json
import sys
from io import StringIO
from typing import Any

import click

from stoker.agent_cli import agent
from stoker.batch.cli import batch
from stoker.cascade.cli import trust
from stoker.command_parts import (
    json_option,
    open_producer,
    or_usage_error,
    redis_option,
    show,
    show_result,
    ticket_of,
    timeout_option,
)
from stoker.connection import usual_url
from stoker.dashboard.command import dashboard
from stoker.serve.command import serve
from stoker.status_command import status, workers
from stoker.submit_command import submit
from stoker_shared.environment import DEFAULT_REDIS_URL, SHOWN, require_known_variables
from stoker_shared.errors import JobError, JobFailed, RequestError, StokerError
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples
from stoker_shared.text import printable

HELP = {"-h", "--help"}


@click.group(
    cls=LaidOutGroup,
    sections={
        "One job": ("submit", "result", "cancel"),
        "Files of jobs": ("batch",),
        "Memory": ("agent",),
        "Models": ("trust",),
        "Server": ("status", "workers", "serve", "dashboard"),
    },
    commands=[submit, agent, batch, workers, status, trust, dashboard, serve],
    context_settings=SETTINGS,
    epilog=examples(
        "stoker submit --message 'Name three rivers.' --wait",
        "stoker batch run IN.jsonl --out OUT.jsonl --any-model",
        "export STOKER_REDIS_URL=rediss://stoker-producer:...@queue.internal:6380",
    ),
)
@click.option("--redis", "redis_url", metavar="URL", default=usual_url, help="Server with the queue.",
              show_default=f"$STOKER_REDIS_URL, else the embedded server of a worker here, by {SHOWN}, else "
              f"{DEFAULT_REDIS_URL}")  # fmt: skip
@click.version_option(package_name="stoker")
@click.pass_context
def cli(context: click.Context, redis_url: str) -> None:
    """Enqueue generation jobs for a stoker worker and read their results."""
    context.obj = redis_url


@cli.command(epilog=examples("stoker result JOB_ID --timeout-s 600", "stoker result JOB_ID --json"))
@click.argument("job_id")
@timeout_option
@json_option
@redis_option
@click.pass_obj
def result(redis_url: str, job_id: str, timeout_s: float | None, as_json: bool) -> None:
    """Wait for a job and print the text it generated."""
    with open_producer(redis_url) as producer:
        show_result(ticket_of(producer, job_id), timeout_s, as_json)


@cli.command(epilog=examples("stoker cancel JOB_ID"))
@click.argument("job_id")
@json_option
@redis_option
@click.pass_obj
def cancel(redis_url: str, job_id: str, as_json: bool) -> None:
    """Cancel a job, whatever it is doing."""
    with open_producer(redis_url) as producer:
        canceled = ticket_of(producer, job_id).cancel()
    show(
        as_json,
        {"job_id": job_id, "canceled": canceled},
        "canceled" if canceled else "too late: it has ended, or its turn is being saved",
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs the command and ends the process with its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(arguments)
    except BrokenPipeError:  # the process that reads our output has ended; at its exit, Python writes what is left
        sys.stdout = sys.stderr = StringIO()
        code = 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Runs the command, and prints its error if it fails. Returns its exit code."""
    error: Exception
    try:
        if not HELP & set(arguments):
            or_usage_error(require_known_variables)
        return cli.main(arguments, prog_name="stoker", standalone_mode=False) or 0
    except click.Abort:
        error, code = StokerError("interrupted; jobs that were submitted continue"), 130
    except click.ClickException as raised:
        if "--json" not in arguments:
            shown = StringIO()
            raised.show(shown)
            click.echo(printable(shown.getvalue(), lines=True), nl=False, err=True)
            return raised.exit_code
        error, code = raised, raised.exit_code
    except StokerError as raised:
        error, code = raised, 2 if isinstance(raised, RequestError) else 1
    if "--json" in arguments:
        click.echo(json.dumps({"error": _as_object(error)}))
    else:
        click.echo(printable(f"{type(error).__name__}: {error}", lines=True), err=True)
    return code


def _as_object(error: Exception) -> dict[str, Any]:
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    described: dict[str, Any] = {"type": type(error).__name__, "message": message}
    if isinstance(error, JobError):
        described["job_id"] = error.job_id
    if isinstance(error, JobFailed):
        described |= {name: getattr(error, name) for name in ("kind", "reason", "retryable", "partial_text")}
    return described
