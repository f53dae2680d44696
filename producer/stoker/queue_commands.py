"""`stoker ls` and `stoker workers`: the queues and the workers, as tables. Only command-line texts."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import click

from stoker.command_parts import json_option, open_producer, redis_option, show
from stoker_shared.help_layout import LaidOutCommand, examples

_COUNTS = ("waiting", "running", "finished", "failed", "deferred", "scheduled")


@click.command(cls=LaidOutCommand, epilog=examples("stoker ls", "stoker ls --json | jq '.queues[].waiting'"))
@json_option
@redis_option
@click.pass_obj
def ls(redis_url: str, as_json: bool) -> None:
    """List the queues: jobs by state, oldest wait, workers.

    Finished and failed jobs are counted until they expire.
    """
    with open_producer(redis_url) as producer:
        queues = producer.queues()
    rows = [
        [
            queue.name,
            *(str(getattr(queue, count)) for count in _COUNTS),
            duration(queue.oldest_wait_s),
            ", ".join(queue.workers) or "none",
        ]
        for queue in queues
    ]
    text = table(["queue", *_COUNTS, "oldest", "workers"], rows, numbers=range(1, 8))
    show(as_json, {"queues": [asdict(queue) for queue in queues]}, text if rows else "no queues and no workers")


@click.command(cls=LaidOutCommand, epilog=examples("stoker workers", "stoker workers --json | jq '.workers[].model'"))
@json_option
@redis_option
@click.pass_obj
def workers(redis_url: str, as_json: bool) -> None:
    """List the live workers: queues, model, context, most jobs in flight.

    A worker that was killed is listed until its lease has run out, for a few seconds.
    """
    with open_producer(redis_url) as producer:
        living = producer.workers()
    now = time.time()
    rows = [
        [
            worker.name,
            worker.host,
            str(worker.pid),
            duration(max(0.0, now - worker.started_at)),
            str(worker.context_tokens or "-"),
            str(worker.max_batch or "-"),
            ",".join(worker.queues),
            worker.model or "loading",
            worker.mode or "-",
        ]
        for worker in living
    ]
    heading = ["worker", "host", "pid", "up", "context", "jobs", "queues", "model", "mode"]
    text = table(heading, rows, numbers=range(2, 6)) if rows else "no workers"
    show(as_json, {"workers": [asdict(worker) for worker in living]}, text)


def duration(seconds: float | None) -> str:
    """A short text: ``42 s``, ``3 min``, ``5 h`` or ``12 d``; ``-`` for ``None``."""
    if seconds is None:
        return "-"
    for unit, size, until in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < until:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], numbers: range) -> str:
    """A table with columns two spaces apart; the columns in `numbers` are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = []
    for row in ([name.upper() for name in heading], *rows):
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
