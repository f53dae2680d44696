"""The commands of `stoker batch`. Owns only their texts, options and exit codes.

Exit codes of `run` and `fetch`: 0 every line succeeded, 3 all are answered and some failed, 4 (`fetch`) some are not
answered yet, 1 the command could not continue (run it again later), 2 the command is wrong, 130 interrupted.
docs/batches.md explains each line and field.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from redis import Redis

from stoker.batch.collecting import Collector
from stoker.batch.input_file import InputChanged, Rows
from stoker.batch.output_file import OutputFile
from stoker.batch.planning import input_file, is_parquet, parquet_packages, plan, plan_options
from stoker.batch.progress import Progress
from stoker.batch.record import (
    BatchGone,
    BatchRecord,
    BatchStatus,
    BatchUnreadable,
    all_batches,
    cancel_batch,
    find_record,
    forget,
    is_held,
    n_bad,
    read_record,
    register,
    status_of,
)
from stoker.batch.work import BatchWork
from stoker.command_parts import json_option, open_server, or_usage_error, redis_option, show
from stoker.connection import WrongKeyType
from stoker.operations import run as carry_out
from stoker.presence import unattended, unready
from stoker_shared.errors import StokerError
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under
from stoker_shared.text import printable

if TYPE_CHECKING:
    from stoker.batch.answer_table import AnswerTable

SOME_FAILED: Final = 3
NOT_ALL: Final = 4

_files = options_under("Answers")
_job = options_under("Jobs")
_input = click.argument("source", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_out = _files("--out", required=True, metavar="OUT", type=click.Path(dir_okay=False, path_type=Path),
              help="File for the answers, .jsonl or .parquet; give the same file to continue.")  # fmt: skip
_in_order = _files("--in-order", is_flag=True, help="Write answers in the order of the lines, not as they end.")


@click.group(
    cls=LaidOutGroup,
    sections={
        "Wait for the answers": ("run",),
        "Fetch them later": ("submit", "status", "fetch", "cancel", "ls"),
    },
    context_settings=SETTINGS,
    epilog=examples(
        "stoker batch run IN.jsonl --out OUT.jsonl --any-model",
        "stoker batch submit IN.jsonl --any-model",
        "stoker batch fetch BATCH --out OUT.jsonl --follow",
    ),
)
def batch() -> None:
    """Run files of OpenAI Batch lines, or of prompts."""


@batch.command(
    epilog=examples(
        "stoker batch run IN.jsonl --out OUT.jsonl --any-model",
        "stoker batch run --prompts prompts.txt --template 'Summarise: {}' --out OUT.jsonl",
        "stoker batch run IN.jsonl --out OUT.jsonl --model-alias gpt-4o=mlx-community/Qwen3-4B-4bit --in-order",
    )
)
@_input
@_out
@_in_order
@_job("--window", type=click.IntRange(min=1), metavar="N",
      help="Lines in Redis at a time.  [1000; with --models, what keeps the workers busy]")  # fmt: skip
@plan_options
@json_option
@redis_option
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    source: Path,
    out: Path,
    in_order: bool,
    window: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a file and wait for its answers; run it again to continue."""
    with open_server(context.obj) as connection, input_file(source, options) as lines:
        planned, feeder = plan(connection, source, lines, options)
        table = _table(out, planned.batch)
        with or_usage_error(lambda: OutputFile(table.answers if table else out, planned.batch)) as output:
            collector = Collector(connection, output, in_order)
            with Progress(planned.n_requests, collector.tally, quiet=as_json) as progress:
                n_answered = len(output.written)
                progress.report(f"batch {planned.batch}: {planned.n_requests:,} lines, {n_answered:,} answered")
                window = window or feeder.usual_window(planned)
                _do(BatchWork(connection, planned.batch, collector, progress, feeder, planned, window), follow=True)
            carry_out(connection, forget(planned.batch))
            _finish(context, as_json, planned, output, table, rows=lines.rows)


@batch.command(
    epilog=examples("stoker batch submit IN.jsonl --any-model --keep 12h", "stoker batch submit --prompts prompts.txt")
)
@_input
@plan_options
@json_option
@redis_option
@click.pass_obj
def submit(url: str, /, source: Path, as_json: bool, **options: Any) -> None:
    """Enqueue a file and return; `fetch` gets the answers."""

    def report(line: str) -> None:
        if not as_json:
            click.echo(printable(line, lines=True), err=True)

    with open_server(url) as connection, input_file(source, options) as lines:
        if not lines.n_requests:
            raise StokerError(f"{source} has no lines")
        planned, feeder = plan(connection, source, lines, options)
        carry_out(connection, register(planned))
        record = _sent_so_far(connection, planned.batch)
        while not record.all_sent:
            if why := feeder.is_held_back():
                at = f"line {record.next_line:,} of {record.n_lines:,}"
                report(f"{at}: {why}; `stoker batch fetch {record.batch}` makes room; ^C to continue later")
                time.sleep(5)
            else:
                _or_stop(partial(feeder.feed, record, record.n_lines))
            record = _sent_so_far(connection, record.batch)
        if carry_out(connection, n_bad(record.batch)) == record.n_requests:
            fetch = f"`stoker batch fetch {record.batch} --out OUT.jsonl` writes why"
            raise StokerError(f"no line of {source} can be run; {fetch}")
        if warning := carry_out(connection, unattended(*record.queues)):
            report(warning)
        show(as_json, {"batch": record.batch, "sent": record.n_sent}, record.batch)


@batch.command(epilog=examples("stoker batch fetch BATCH --out OUT.jsonl --follow"))
@click.argument("name", metavar="BATCH")
@_out
@_in_order
@_files("--follow", is_flag=True, help="Wait until every line is answered.")
@json_option
@redis_option
@click.pass_context
def fetch(context: click.Context, /, *, name: str, out: Path, in_order: bool, follow: bool, as_json: bool) -> None:
    """Write the answers that have come to a file, and remove them from Redis."""
    with open_server(context.obj) as connection:
        record = or_usage_error(lambda: carry_out(connection, find_record(name)))
        table = _table(out, record.batch)
        with or_usage_error(lambda: OutputFile(table.answers if table else out, record.batch)) as output:
            collector = Collector(connection, output, in_order)
            with Progress(record.n_requests, collector.tally, quiet=as_json) as progress:
                _do(BatchWork(connection, record.batch, collector, progress), follow=follow)
            _finish(context, as_json, carry_out(connection, find_record(record.batch)), output, table)


def _table(out: Path, batch: str) -> "AnswerTable | None":
    if not is_parquet(out):
        return None
    with parquet_packages():
        from stoker.batch.answer_table import AnswerTable
    return or_usage_error(lambda: AnswerTable(out, batch))


def _sent_so_far(connection: Redis, name: str) -> BatchRecord:
    record = carry_out(connection, read_record(name))
    if record is None:
        raise BatchGone(name, "run the same command again to begin from its first line")
    if record.canceled:
        raise click.UsageError(f"batch {name} was canceled; `stoker batch cancel --forget` forgets it")
    return record


def _do(work: BatchWork, *, follow: bool) -> None:
    or_usage_error(work.begin)
    try:
        _or_stop(partial(work.go, follow=follow))
    except KeyboardInterrupt:
        work.progress.report("run the same command again to continue from here")
        raise
    finally:
        work.end()


def _or_stop(work: Callable[[], Any]) -> None:
    """Raises `StokerError`: a file can no longer be read or written; the same command continues later."""
    try:
        work()
    except (InputChanged, OSError) as error:
        raise StokerError(str(error)) from None


def _finish(
    context: click.Context,
    as_json: bool,
    record: BatchRecord,
    output: OutputFile,
    table: "AnswerTable | None",
    *,
    rows: Rows | None = None,
) -> None:
    n_answered, n_failed = len(output.written), output.n_failed
    counts = {"batch": record.batch, "lines": record.n_requests, "succeeded": n_answered - n_failed, "failed": n_failed}
    left = record.n_requests - n_answered
    if table is not None and not left:
        _or_stop(lambda: table.write(record.n_lines, rows))
    cut_off = f" ({output.n_cut_off:,} cut off by max_tokens)" if output.n_cut_off else ""
    text = f"{n_answered - n_failed:,} succeeded{cut_off}, {n_failed:,} failed"
    text += f" ({output.causes})" if n_failed else ""
    text += f", {left:,} not answered yet" if left else ""
    text += f"; {table.path} is written when all are" if left and table is not None else ""
    if as_json:
        checked = output.attempts.as_json() if output.attempts.models else {}
        click.echo(
            json.dumps({**counts, "left": left, "cut_off": output.n_cut_off, "causes": output.causes.counts, **checked})
        )
    else:
        if output.attempts.models:
            click.echo(printable(output.attempts.text(), lines=True), err=True)
        click.echo(printable(text), err=True)
    context.exit(NOT_ALL if left else SOME_FAILED if n_failed else 0)


@batch.command(epilog=examples("stoker batch status BATCH", "stoker batch status BATCH --json | jq .state"))
@click.argument("name", metavar="BATCH")
@json_option
@redis_option
@click.pass_obj
def status(url: str, name: str, as_json: bool) -> None:
    """Count the lines of a batch: waiting, running, done, failed."""
    with open_server(url) as connection:
        record = or_usage_error(lambda: carry_out(connection, find_record(name)))
        now = carry_out(connection, status_of(record))
        warning = carry_out(connection, unready(*record.queues)) if now.waiting else None
    line = _as_line(record, now) + (f"; {warning}" if warning else "")
    show(as_json, {**_as_object(record, now), "warning": warning}, line)


@batch.command(epilog=examples("stoker batch cancel BATCH", "stoker batch cancel BATCH --forget"))
@click.argument("name", metavar="BATCH")
@_job("--forget", "and_forget", is_flag=True, help="Also remove the batch and its answers from Redis.")
@json_option
@redis_option
@click.pass_obj
def cancel(url: str, name: str, and_forget: bool, as_json: bool) -> None:
    """Cancel the lines that have not ended; `fetch` still gets the others."""
    with open_server(url) as connection:
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


@batch.command(epilog=examples("stoker batch ls"))
@json_option
@redis_option
@click.pass_obj
def ls(url: str, as_json: bool) -> None:
    """List the batches that are in Redis."""
    with open_server(url) as connection:
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
    return {**known, "state": _state_of(record, now), **asdict(now)}


def _as_line(record: BatchRecord, now: BatchStatus) -> str:
    counts = ((now.not_sent, "not sent"), (now.waiting, "waiting"), (now.running, "running"))
    parts = [f"{count:,} {name}" for count, name in counts if count]
    parts += [f"{now.done:,} done", f"{now.failed:,} failed"]
    return f"{_state_of(record, now)}: {', '.join(parts)} ({record.source}, {record.n_requests:,} lines)"


def _state_of(record: BatchRecord, now: BatchStatus) -> str:
    return "canceled" if record.canceled else now.state
