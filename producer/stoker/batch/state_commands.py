"""`stoker batch status`, `cancel` and `ls`: they use only Redis, not the files. Only command-line texts."""

from dataclasses import asdict
from typing import Any

import click

from stoker.batch.canceling import cancel_batch
from stoker.batch.record import BatchRecord, BatchUnreadable, all_batches, find_record, is_held, read_record
from stoker.batch.status import BatchStatus, status_of
from stoker.command_parts import json_option, or_usage_error, redis_option, show
from stoker.connection import WrongKeyType, open_connection
from stoker.operations import run as carry_out
from stoker.presence import first_unattended
from stoker_shared.errors import StokerError
from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.text import printable

_job = options_under("Jobs")


@click.command(
    cls=LaidOutCommand, epilog=examples("stoker batch status BATCH", "stoker batch status BATCH --json | jq .state")
)
@click.argument("name", metavar="BATCH")
@json_option
@redis_option
@click.pass_obj
def status(url: str, name: str, as_json: bool) -> None:
    """Count the lines of a batch: waiting, running, done, failed."""
    with or_usage_error(lambda: open_connection(url)) as connection:
        record = or_usage_error(lambda: carry_out(connection, find_record(name)))
        now = carry_out(connection, status_of(record))
        warning = carry_out(connection, first_unattended(record.queues)) if now.waiting else None
    line = _as_line(record, now) + (f"; {warning}" if warning else "")
    show(as_json, {**_as_object(record, now), "warning": warning}, line)


@click.command(cls=LaidOutCommand, epilog=examples("stoker batch cancel BATCH", "stoker batch cancel BATCH --forget"))
@click.argument("name", metavar="BATCH")
@_job("--forget", "and_forget", is_flag=True, help="Also remove the batch and its answers from Redis.")
@json_option
@redis_option
@click.pass_obj
def cancel(url: str, name: str, and_forget: bool, as_json: bool) -> None:
    """Cancel the lines that have not ended; `fetch` still gets the others."""
    with or_usage_error(lambda: open_connection(url)) as connection:
        record = or_usage_error(lambda: carry_out(connection, find_record(name)))
        if and_forget and carry_out(connection, is_held(record.batch)):
            raise StokerError(f"a process is fetching the answers of {record.batch}; end it first, or omit --forget")
        try:
            n_canceled = carry_out(connection, cancel_batch(record, remove=and_forget))
        except KeyboardInterrupt:
            raise StokerError(
                f"interrupted, but {record.batch} is canceled: its waiting lines will not run; repeat the command to "
                "stop those that run"
            ) from None
    line = f"{n_canceled:,} {'line' if n_canceled == 1 else 'lines'} canceled"
    line += f", and {record.batch} forgotten" if and_forget else ""
    show(as_json, {"batch": record.batch, "canceled": n_canceled}, line)


@click.command(cls=LaidOutCommand, epilog=examples("stoker batch ls"))
@json_option
@redis_option
@click.pass_obj
def ls(url: str, as_json: bool) -> None:
    """List the batches that are in Redis."""
    with or_usage_error(lambda: open_connection(url)) as connection:
        found = []
        for name in carry_out(connection, all_batches()):
            try:
                if (record := carry_out(connection, read_record(name))) is not None:
                    found.append((record, carry_out(connection, status_of(record))))
            except (BatchUnreadable, WrongKeyType):
                click.echo(printable(str(BatchUnreadable(name))), err=True)
    lines = "\n".join(printable(f"{record.batch}  {_as_line(record, now)}") for record, now in found)
    show(as_json, {"batches": [_as_object(record, now) for record, now in found]}, lines or "no batches")


def _as_object(record: BatchRecord, now: BatchStatus) -> dict[str, Any]:
    known = {"batch": record.batch, "source": record.source, "queue": record.queue, "lines": record.n_requests}
    return {**known, "state": _state(record, now), **asdict(now)}


def _as_line(record: BatchRecord, now: BatchStatus) -> str:
    counts = ((now.not_sent, "not sent"), (now.waiting, "waiting"), (now.running, "running"))
    parts = [f"{count:,} {name}" for count, name in counts if count]
    parts += [f"{now.done:,} done", f"{now.failed:,} failed"]
    return f"{_state(record, now)}: {', '.join(parts)} ({record.source}, {record.n_requests:,} lines)"


def _state(record: BatchRecord, now: BatchStatus) -> str:
    return "canceled" if record.canceled else now.state
