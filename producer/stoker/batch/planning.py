"""What the command line makes of a file: the record of a new batch, and what sends its lines."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from redis import Redis

from stoker.batch.feeding import Feeder
from stoker.batch.fields import LineOptions
from stoker.batch.input_file import InputFile
from stoker.batch.naming import MAX_NAME_CHARACTERS, batch_for, fingerprint_of, is_batch_name
from stoker.batch.register import BatchRecord, now_s
from stoker.job_options import JobOptions
from stoker.queue_name import checked_queue_name

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST_S = 3650 * 86_400


def plan(connection: Redis, source: Path, lines: InputFile, options: Mapping[str, Any]) -> tuple[BatchRecord, Feeder]:
    """The record of the batch that this file is, and what sends its lines.

    Args:
        options: those of the command that shape requests and jobs.

    Raises:
        click.UsageError: one of them cannot be.
    """
    name, keep_s = options["name"], _seconds(options["keep"])
    if name is not None and not is_batch_name(name):
        raise click.UsageError(f"--name: at most {MAX_NAME_CHARACTERS} English letters, digits, - and _")
    queue = _queue(options["queue"])
    line_options = LineOptions(_aliases(options["model_aliases"]), options["any_model"], options["max_tokens"])
    fingerprint = fingerprint_of(lines.digest, [name, queue, asdict(line_options)])
    shown = source.name.encode(errors="replace").decode()
    record = BatchRecord(batch_for(name, fingerprint), queue, shown, lines.n_requests, lines.n_lines, keep_s, now_s())
    jobs = JobOptions(options["job_timeout_s"], result_ttl_s=keep_s, failure_ttl_s=keep_s, ttl_s=keep_s)
    return record, Feeder(connection, lines, line_options, jobs, options["max_redis_bytes"])


def _aliases(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [alias.partition("=") for alias in given]
    if not all(theirs and ours for theirs, _, ours in pairs):
        raise click.UsageError("--model-alias: expected THEIRS=OURS")
    return {theirs: ours for theirs, _, ours in pairs}


def _seconds(duration: str) -> int:
    number, unit = duration[:-1], _UNITS_S.get(duration[-1:])
    if unit is None or not re.fullmatch("[0-9]{1,9}", number) or not 0 < int(number) * unit <= _MOST_S:
        raise click.UsageError("--keep: expected a number and a unit, as in 90m, 12h or 7d; 3650d at the most")
    return int(number) * unit


def _queue(name: str) -> str:
    try:
        return checked_queue_name(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
