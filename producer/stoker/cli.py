"""The `stoker` command: submit a job, read its result, ask where it stands, cancel it; the dashboard. Words only.

With ``--json``, stdout is exactly one JSON object, also for an error: ``{"error": {"type": …, "message": …}}``.
Without, stdout is the text or the id and everything else goes to stderr. Exit codes: 0 done, 1 the job failed, was
canceled, not found or not finished in time, or Redis is away, 2 the command or the request is wrong, 130 interrupted.
"""

import json
import sys
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click

from stoker.batch.cli import batch
from stoker.producer import Producer
from stoker.ticket import Ticket
from stoker.ticket_status import TicketStatus
from stoker_shared.errors import JobError, JobFailed, RequestError, StokerError
from stoker_shared.result import GenerationResult
from stoker_shared.wire import DEFAULT_QUEUE

T = TypeVar("T")
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"

_text_file = click.File("r", encoding="utf-8")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
_timeout_option = click.option(
    "--timeout-s", type=click.FloatRange(min=0), help="Longest wait, in seconds; without it, until the job ends."
)


def _use_server(context: click.Context, parameter: click.Parameter, url: str | None) -> None:
    if url is not None:
        context.obj = url


_redis_option = click.option(
    "--redis",
    metavar="URL",
    callback=_use_server,
    expose_value=False,
    help="Server that holds the queue, here or before the command.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--redis", "redis_url", metavar="URL", default=DEFAULT_REDIS_URL, envvar="STOKER_REDIS_URL",
              show_envvar=True, help="Server that holds the queue.")  # fmt: skip
@click.version_option(package_name="stoker")
@click.pass_context
def cli(context: click.Context, redis_url: str) -> None:
    """Enqueue generation jobs for a stoker worker and read their results."""
    context.obj = redis_url


@cli.command()
@click.option("--agent", "agent_id", required=True, metavar="ID", help="Whose memory the job uses and extends.")
@click.option("--prompt", help="The prompt itself, read by the model as it is.")
@click.option("--message", help="One chat message from the user.")
@click.option("--prompt-file", type=_text_file, help="File with the prompt, taken as it is; - reads stdin.")
@click.option("--messages-file", type=_text_file, help="JSON file with a list of chat messages; - reads stdin.")
@click.option("--max-tokens", type=int, default=256)
@click.option("--temperature", type=float, default=0.0)
@click.option("--context", type=click.Choice(["full", "append"]), default="full")
@click.option("--cache", type=click.Choice(["readwrite", "read", "off"]), default="readwrite")
@click.option("--queue", default=DEFAULT_QUEUE)
@click.option("--stop", multiple=True, help="Text that ends the generation; may be given several times.")
@click.option("--seed", type=int)
@click.option("--job-id", metavar="ID", help="Your own id: the same command again makes no second job.")
@click.option("--wait", is_flag=True, help="Wait for the job and print what it generated.")
@_timeout_option
@_json_option
@_redis_option
@click.pass_obj
def submit(redis_url: str, /, wait: bool, timeout_s: float | None, as_json: bool, **fields: Any) -> None:
    """Enqueue one job and print its id."""
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout-s needs --wait")
    request = _with_input(fields)
    with _producer(redis_url) as producer:
        ticket = producer.submit(**request)
        if wait:
            if not as_json:
                click.echo(f"job {ticket.job_id}", err=True)
            _show_result(ticket, timeout_s, as_json)
        else:
            _show(as_json, {"job_id": ticket.job_id}, ticket.job_id)


@cli.command()
@click.argument("job_id")
@_timeout_option
@_json_option
@_redis_option
@click.pass_obj
def result(redis_url: str, job_id: str, timeout_s: float | None, as_json: bool) -> None:
    """Wait for a job and print what it generated."""
    with _producer(redis_url) as producer:
        _show_result(_ticket(producer, job_id), timeout_s, as_json)


@cli.command()
@click.argument("job_id")
@_json_option
@_redis_option
@click.pass_obj
def status(redis_url: str, job_id: str, as_json: bool) -> None:
    """Say where a job stands."""
    with _producer(redis_url) as producer:
        now = _ticket(producer, job_id).status()
    fields = {"job_id": job_id, "state": now.state, "position": now.position, "tokens": now.tokens}
    _show(as_json, {**fields, "worker": now.worker}, _status_line(now))


@cli.command()
@click.argument("job_id")
@_json_option
@_redis_option
@click.pass_obj
def cancel(redis_url: str, job_id: str, as_json: bool) -> None:
    """Cancel a job, or stop it while it runs."""
    with _producer(redis_url) as producer:
        canceled = _ticket(producer, job_id).cancel()
    _show(as_json, {"job_id": job_id, "canceled": canceled}, "canceled" if canceled else "it had already ended")


@cli.command()
@click.option("--bind", default="127.0.0.1", metavar="HOST", help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=9181, help="0 for any free one.")
@click.option("--allow-remote", is_flag=True, help="Let --bind be reached from other machines. There is no password.")
@click.option("--name", "names", multiple=True, help="Host name or address it may be reached by; several are possible.")
@_redis_option
@click.pass_obj
def dashboard(redis_url: str, /, **options: Any) -> None:
    """Serve rq-dashboard: queues, jobs, results and workers in a browser."""
    from stoker.dashboard import serve_dashboard

    try:
        _or_usage_error(lambda: serve_dashboard(redis_url, say=lambda line: click.echo(line, err=True), **options))
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the dashboard's packages are missing ({error.name}); install them with: pip install 'stoker[dashboard]'"
        ) from None


cli.add_command(batch)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs the command and ends the process with its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    error: Exception
    try:
        sys.exit(cli.main(arguments, prog_name="stoker", standalone_mode=False) or 0)
    except click.Abort:
        error, code = StokerError("interrupted; a job that was submitted goes on"), 130
    except click.ClickException as raised:
        if "--json" not in arguments:
            raised.show()
            sys.exit(raised.exit_code)
        error, code = raised, raised.exit_code
    except StokerError as raised:
        error, code = raised, 2 if isinstance(raised, RequestError) else 1
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        sys.exit(1)
    if "--json" in arguments:
        click.echo(json.dumps({"error": _as_object(error)}))
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)
    sys.exit(code)


def _as_object(error: Exception) -> dict[str, Any]:
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    described: dict[str, Any] = {"type": type(error).__name__, "message": message}
    if isinstance(error, JobError):
        described["job_id"] = error.job_id
    if isinstance(error, JobFailed):
        described |= {"reason": error.reason, "partial_text": error.partial_text}
    return described


def _producer(redis_url: str) -> Producer:
    return _or_usage_error(lambda: Producer(redis_url))


def _ticket(producer: Producer, job_id: str) -> Ticket:
    return _or_usage_error(lambda: producer.ticket(job_id))


def _or_usage_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _with_input(fields: dict[str, Any]) -> dict[str, Any]:
    """The request's fields with the one input read from where the options say."""
    given = {name: fields.pop(name) for name in ("prompt", "message", "prompt_file", "messages_file")}
    if sum(value is not None for value in given.values()) != 1:
        raise click.UsageError("give exactly one of --prompt, --prompt-file, --message and --messages-file")
    if given["message"] is not None:
        return {**fields, "messages": [{"role": "user", "content": given["message"]}]}
    if given["messages_file"] is not None:
        return {**fields, "messages": _read_messages(given["messages_file"])}
    return {**fields, "prompt": given["prompt"] if given["prompt_file"] is None else _read(given["prompt_file"])}


def _read_messages(file: IO[str]) -> Any:
    try:
        return json.loads(_read(file))
    except (ValueError, RecursionError):
        raise click.UsageError(
            f"{_name(file)} is not JSON; expected a list of messages with role and content"
        ) from None


def _read(file: IO[str]) -> str:
    try:
        return file.read()
    except UnicodeDecodeError:
        raise click.UsageError(f"{_name(file)} is not UTF-8 text") from None


def _name(file: IO[str]) -> str:
    return str(getattr(file, "name", "<stdin>"))


def _show_result(ticket: Ticket, timeout_s: float | None, as_json: bool) -> None:
    generated = ticket.result(timeout_s)
    _show(as_json, generated.model_dump(mode="json"), generated.text)
    if not as_json:
        click.echo(_summary(generated), err=True)


def _summary(generated: GenerationResult) -> str:
    usage = generated.usage
    return (
        f"[{generated.finish_reason}: {usage.completion_tokens} tokens in {generated.timing.total_s:.1f} s, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from memory]"
    )


def _status_line(now: TicketStatus) -> str:
    if now.position is not None:
        return f"{now.state}, {now.position} ahead of it" if now.position else f"{now.state}, next"
    details = [f"on {now.worker}"] if now.worker else []
    details += [f"{now.tokens} tokens so far"] if now.tokens is not None else []
    return ", ".join([now.state, *details])


def _show(as_json: bool, value: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(value) if as_json else text)
