"""`stoker ls` and `stoker workers`: the queues and who serves them, as tables. Words only."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from stoker.command_parts import json_option, open_producer, redis_option, show
from stoker.queue_status import QueueStatus
from stoker_shared.help_layout import LaidOutCommand, examples

_COUNTS = ("waiting", "running", "finished", "failed", "deferred", "scheduled")


@click.command(cls=LaidOutCommand, epilog=examples("stoker ls", "stoker ls --json | jq '.queues[].waiting'"))
@json_option
@redis_option
@click.pass_obj
def ls(redis_url: str, as_json: bool) -> None:
    """List the queues: their jobs by state, the oldest wait, the worker.

    Finished and failed jobs are counted until they expire.
    """
    with open_producer(redis_url) as producer:
        queues = producer.queues()
    rows = [[queue.name, *(str(getattr(queue, count)) for count in _COUNTS), *_service(queue)] for queue in queues]
    heading = ["queue", *_COUNTS, "oldest", "worker"]
    text = table(heading, rows, numbers=range(1, 8)) if rows else "no queues: nothing was ever enqueued here"
    show(as_json, {"queues": [asdict(queue) for queue in queues]}, text)


def _service(queue: QueueStatus) -> tuple[str, str]:
    return duration(queue.oldest_wait_s), queue.worker or "none"


def duration(seconds: float | None) -> str:
    """A short text, `-` for ``None``: ``42 s``, ``3 min``, ``5 h``, ``12 d``."""
    if seconds is None:
        return "-"
    for unit, size, until in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < until:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], numbers: range) -> str:
    """Columns two spaces apart; those in `numbers` end flush right."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = []
    for row in ([name.upper() for name in heading], *rows):
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
