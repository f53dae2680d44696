"""Parts that the commands of `stoker` share: options, opening the server, printing. Only command-line texts."""

import json
import sys
from collections.abc import Callable
from itertools import chain, islice
from typing import Any, TypeVar

import click
from redis import Redis

from stoker.connection import open_connection
from stoker.producer import Producer
from stoker.streaming import TextChunk
from stoker.tickets import Ticket, TicketStatus
from stoker.wait_line import shown_wait
from stoker_shared.help_layout import options_under
from stoker_shared.result import GenerationResult
from stoker_shared.text import printable

T = TypeVar("T")


def _use_server(context: click.Context, parameter: click.Parameter, url: str | None) -> None:
    if url is not None:
        context.obj = url


_output = options_under("Output")
json_option = _output("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
timeout_option = _output(
    "--timeout-s", type=click.FloatRange(min=0), metavar="S", help="Longest wait, in seconds; by default no limit."
)
redis_option = options_under("Server")(
    "--redis",
    metavar="URL",
    callback=_use_server,
    expose_value=False,
    help="Server with the queue; may also be given before the command.  [STOKER_REDIS_URL]",
)


def open_server(redis_url: str) -> Redis:
    return or_usage_error(lambda: open_connection(redis_url))


def open_producer(redis_url: str) -> Producer:
    return or_usage_error(lambda: Producer(redis_url))


def ticket_of(producer: Producer, job_id: str) -> Ticket:
    return or_usage_error(lambda: producer.ticket(job_id))


def or_usage_error(make: Callable[[], T]) -> T:
    """The value that `make` returns. Raises `click.UsageError` for its `ValueError`, or its `OSError` about a file."""
    try:
        return make()
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def require_consent(context: click.Context, question: str, otherwise: str, *, yes: bool, as_json: bool) -> None:
    """Ask unless `yes` is given, and end the command with the text `otherwise` if the user does not agree; closed stdin
    and ^C count as no. Raises `click.UsageError`: there is no asking beside --json."""
    if as_json and not yes:
        raise click.UsageError("--json needs --yes")
    try:
        yes = yes or click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
    if not yes:
        click.echo(otherwise, err=True)
        context.exit(1)


def show(as_json: bool, value: Any, text: str) -> None:
    click.echo(json.dumps(value) if as_json else printable(text, lines=True))


def status_text(now: TicketStatus) -> str:
    parts = [now.state]
    if now.position is not None:
        parts.append(f"{now.position} ahead of it" if now.position else "next")
    if now.worker:
        parts.append(f"on {now.worker}")
    if now.stage:
        parts.append(now.stage)
    if now.tokens:
        parts.append(f"{now.tokens} tokens so far, {now.tokens_per_s:g} a second")
    return ", ".join(parts) + (f"; {now.warning}" if now.warning else "")


def show_result(ticket: Ticket, timeout_s: float | None, as_json: bool) -> None:
    with shown_wait(lambda: status_text(ticket.status()), quiet=as_json):
        generated = ticket.result(timeout_s)
    if as_json:
        show(as_json, generated.model_dump(mode="json"), "")
        return
    texts = [choice.text for choice in generated.choices or [generated]]
    click.echo("\n".join(map(_answer, texts)))
    click.echo(_summary(generated), err=True)


def show_stream(ticket: Ticket, timeout_s: float | None) -> None:
    """Print the text to stdout as it comes; a text that begins again begins on a new line."""
    try:
        events = ticket.stream(timeout_s)
        with shown_wait(lambda: status_text(ticket.status())):
            first = list(islice(events, 1))
        for event in chain(first, events):
            if isinstance(event, TextChunk):
                click.echo(_answer(event.text), nl=False)
            else:
                click.echo()
                click.echo("[the text begins again: the job's worker was lost, or the job is retried]", err=True)
    finally:
        click.echo()
    click.echo(_summary(ticket.result(timeout_s=0)), err=True)


def _answer(text: str) -> str:
    """A generated text; only a terminal gets it with control characters escaped."""
    return printable(text, lines=True) if sys.stdout.isatty() else text


def _summary(generated: GenerationResult) -> str:
    usage = generated.usage
    return (
        f"[{generated.finish_reason}: {usage.completion_tokens} tokens in {generated.timing.total_s:.1f} s, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from memory]"
    )
