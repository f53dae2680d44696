"""`stoker batch`: files of OpenAI Batch lines. Words only; docs/batches.md has the meaning of each line and field.

Exit codes of `run` and `fetch`: 0 every line succeeded, 3 all are answered and some failed, 4 (`fetch`) not all are
answered yet; 1 it could not go on (the same command goes on later), 2 the command is wrong, 130 interrupted.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from redis import Redis

from stoker.batch.canceling import cancel_batch
from stoker.batch.collecting import Collector
from stoker.batch.holding import is_held
from stoker.batch.input_file import InputChanged, InputFile
from stoker.batch.output_file import OutputFile, OutputRefused
from stoker.batch.planning import plan, plan_options
from stoker.batch.progress import Progress
from stoker.batch.record import BatchGone, BatchRecord, all_batches, forget, read_record, register
from stoker.batch.status import BatchStatus, status_of
from stoker.batch.work import BatchWork
from stoker.command_parts import json_option, redis_option, show
from stoker.connection import open_connection
from stoker.driver import run as carry_out
from stoker.presence import unattended
from stoker_shared.errors import StokerError
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under

SOME_FAILED: Final = 3
NOT_ALL: Final = 4
T = TypeVar("T")


_files = options_under("Answers")
_job = options_under("Jobs")
_input = click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_out = _files("--out", required=True, metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path),
              help="File for the answers; the same one when it goes on.")  # fmt: skip
_in_order = _files("--in-order", is_flag=True, help="Write answers in the order of the lines, not as they end.")


@click.group(
    cls=LaidOutGroup,
    sections={"Wait for it": ("run",), "Or do not": ("submit", "status", "fetch", "cancel", "ls")},
    context_settings=SETTINGS,
    epilog=examples(
        "stoker batch run IN.jsonl --out OUT.jsonl --any-model",
        "stoker batch submit IN.jsonl --any-model",
        "stoker batch fetch BATCH --out OUT.jsonl --follow",
    ),
)
def batch() -> None:
    """Run files of OpenAI Batch lines."""


@batch.command(
    epilog=examples(
        "stoker batch run IN.jsonl --out OUT.jsonl --any-model",
        "stoker batch run IN.jsonl --out OUT.jsonl --model-alias gpt-4o=mlx-community/Qwen3-4B-4bit --in-order",
    )
)
@_input
@_out
@_in_order
@_job(
    "--window",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Lines in Redis at a time.",
)
@plan_options
@json_option
@redis_option
@click.pass_context
def run(
    context: click.Context, /, *, source: Path, out: Path, in_order: bool, window: int, as_json: bool, **options: Any
) -> None:
    """Run a file and wait for its answers; started again, it goes on."""
    with _server(context.obj) as connection, _read(source) as lines:
        planned, feeder = plan(connection, source, lines, options)
        with _output(out, planned.batch) as output:
            collector = Collector(connection, output, in_order)
            with Progress(planned.n_requests, collector.tally, quiet=as_json) as progress:
                progress.say(f"batch {planned.batch}: {planned.n_requests:,} lines, {len(output.written):,} answered")
                work = BatchWork(connection, planned.batch, collector, progress, feeder, planned, window)
                _do(work, follow=True)
            carry_out(connection, forget(planned.batch))
            _finish(context, as_json, planned, output)


@batch.command(epilog=examples("stoker batch submit IN.jsonl --any-model --keep 12h"))
@_input
@plan_options
@json_option
@redis_option
@click.pass_obj
def submit(url: str, /, source: Path, as_json: bool, **options: Any) -> None:
    """Enqueue a file and return; `fetch` gets the answers."""
    with _server(url) as connection, _read(source) as lines:
        planned, feeder = plan(connection, source, lines, options)
        carry_out(connection, register(planned))
        record = _sent_so_far(connection, planned.batch)
        while not record.all_sent:
            if why := feeder.is_held_back():
                at = f"line {record.next_line:,} of {record.n_lines:,}"
                _say(as_json, f"{at}: {why}; `stoker batch fetch {record.batch}` makes room; ^C: go on later")
                time.sleep(5)
            else:
                _or_stop(partial(feeder.feed, record, record.n_lines))
            record = _sent_so_far(connection, record.batch)
        if warning := carry_out(connection, unattended(record.queue)):
            _say(as_json, warning)
        show(as_json, {"batch": record.batch, "sent": record.n_sent}, record.batch)


@batch.command(epilog=examples("stoker batch status BATCH", "stoker batch status BATCH --json | jq .state"))
@click.argument("name", metavar="BATCH")
@json_option
@redis_option
@click.pass_obj
def status(url: str, name: str, as_json: bool) -> None:
    """Count the lines of a batch: waiting, running, done, failed."""
    with _server(url) as connection:
        record = _find(connection, name)
        now = carry_out(connection, status_of(record))
        warning = carry_out(connection, unattended(record.queue)) if now.waiting else None
    line = _as_line(record, now) + (f"; {warning}" if warning else "")
    show(as_json, {**_as_object(record, now), "warning": warning}, line)


@batch.command(epilog=examples("stoker batch fetch BATCH --out OUT.jsonl --follow"))
@click.argument("name", metavar="BATCH")
@_out
@_in_order
@_files("--follow", is_flag=True, help="Wait until every line is answered.")
@json_option
@redis_option
@click.pass_context
def fetch(context: click.Context, /, *, name: str, out: Path, in_order: bool, follow: bool, as_json: bool) -> None:
    """Write the answers that are there to a file, and remove them from Redis."""
    with _server(context.obj) as connection:
        record = _find(connection, name)
        with _output(out, record.batch) as output:
            collector = Collector(connection, output, in_order)
            with Progress(record.n_requests, collector.tally, quiet=as_json) as progress:
                work = BatchWork(connection, record.batch, collector, progress)
                _do(work, follow=follow)
            _finish(context, as_json, _find(connection, record.batch), output)


@batch.command(epilog=examples("stoker batch cancel BATCH", "stoker batch cancel BATCH --forget"))
@click.argument("name", metavar="BATCH")
@_job("--forget", "and_forget", is_flag=True, help="Also remove it, and its answers, from Redis.")
@json_option
@redis_option
@click.pass_obj
def cancel(url: str, name: str, and_forget: bool, as_json: bool) -> None:
    """Cancel the lines that have not ended; `fetch` still gets the others."""
    with _server(url) as connection:
        record = _find(connection, name)
        if and_forget and carry_out(connection, is_held(record.batch)):
            raise StokerError(f"a process takes the answers of {record.batch} out; end it first, or leave out --forget")
        n_canceled = carry_out(connection, cancel_batch(record, remove=and_forget))
    line = f"{n_canceled:,} {'line' if n_canceled == 1 else 'lines'} canceled" + (
        f", and {record.batch} forgotten" if and_forget else ""
    )
    show(as_json, {"batch": record.batch, "canceled": n_canceled}, line)


@batch.command(epilog=examples("stoker batch ls"))
@json_option
@redis_option
@click.pass_obj
def ls(url: str, as_json: bool) -> None:
    """List the batches that are in Redis."""
    with _server(url) as connection:
        records = [carry_out(connection, read_record(name)) for name in carry_out(connection, all_batches())]
        found = [(record, carry_out(connection, status_of(record))) for record in records if record is not None]
    lines = "\n".join(f"{record.batch}  {_as_line(record, now)}" for record, now in found)
    show(as_json, {"batches": [_as_object(record, now) for record, now in found]}, lines or "no batches")


def _sent_so_far(connection: Redis, name: str) -> BatchRecord:
    record = carry_out(connection, read_record(name))
    if record is None:
        raise BatchGone(f"no batch {name} in Redis any more; the same command begins anew")
    if record.canceled:
        raise click.UsageError(f"batch {name} was canceled; `stoker batch cancel --forget` forgets it")
    return record


def _find(connection: Redis, name: str) -> BatchRecord:
    """The batch of this id, or the one whose id begins so."""
    record = carry_out(connection, read_record(name))
    if record is None:
        fitting = [batch for batch in carry_out(connection, all_batches()) if batch.startswith(name)]
        if len(fitting) > 1:
            raise click.UsageError(f"{name!r} begins the ids of several batches: {', '.join(fitting)}")
        record = carry_out(connection, read_record(fitting[0])) if fitting else None
    if record is None:
        raise BatchGone(f"no batch {name} in Redis; `stoker batch ls` shows which there are")
    return record


def _finish(context: click.Context, as_json: bool, record: BatchRecord, output: OutputFile) -> None:
    n_answered, n_failed = len(output.written), output.n_failed
    counts = {"batch": record.batch, "lines": record.n_requests, "succeeded": n_answered - n_failed, "failed": n_failed}
    left = record.n_requests - n_answered
    text = f"{n_answered - n_failed:,} succeeded, {n_failed:,} failed"
    text += f" ({output.causes})" if n_failed else ""
    text += f", {left:,} not answered yet" if left else ""
    if as_json:
        click.echo(json.dumps({**counts, "left": left, "causes": output.causes.counts}))
    else:
        click.echo(text, err=True)
    context.exit(NOT_ALL if left else SOME_FAILED if n_failed else 0)


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


def _server(url: str) -> Redis:
    return _or_usage_error(lambda: open_connection(url))


def _read(source: Path) -> InputFile:
    return _or_usage_error(lambda: InputFile(source))


def _output(path: Path, name: str) -> OutputFile:
    return _or_usage_error(lambda: OutputFile(path, name))


def _or_usage_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except (ValueError, OutputRefused) as error:
        raise click.UsageError(str(error)) from None


def _do(work: BatchWork, *, follow: bool) -> None:
    _or_usage_error(work.begin)
    try:
        _or_stop(partial(work.go, follow=follow))
    except KeyboardInterrupt:
        work.progress.say("the same command goes on from here")
        raise
    finally:
        work.end()


def _or_stop(work: Callable[[], Any]) -> None:
    """
    Raises:
        StokerError: a file cannot be read or written any more; the same command goes on later.
    """
    try:
        work()
    except (InputChanged, OSError) as error:
        raise StokerError(str(error)) from None


def _say(as_json: bool, line: str) -> None:
    if not as_json:
        click.echo(line, err=True)
