"""Which queue the dashboard's page of jobs opens with. Reads only."""

from collections.abc import Sequence
from typing import Any, Final

from flask import Flask
from redis import Redis

from stoker.operations import run
from stoker.overview import QueueStatus, queues_now
from stoker_shared.wire import DEFAULT_QUEUE

_VIEW: Final = "rq_dashboard.jobs_overview"
_COUNTED_IN: Final = {
    "queued": "waiting",
    "started": "running",
    "scheduled": "scheduled",
    "deferred": "deferred",
    "failed": "failed",
    "finished": "finished",
}
"""RQ's registries as rq-dashboard names them, in the order in which they are searched, and our counts of their jobs."""


def open_a_queue_with_jobs(app: Flask, connection: Redis) -> None:
    """Open the queue with the most jobs that wait, or else run.

    rq-dashboard opens the queue ``default`` and says "No jobs", however many there are elsewhere, as of 0.9.0.
    """
    original = app.view_functions[_VIEW]

    def view(queue_name: str | None, registry_name: str, **others: Any) -> Any:
        if queue_name is None:
            queue_name, registry_name = place_with_jobs(run(connection, queues_now()))
        return original(queue_name=queue_name, registry_name=registry_name, **others)

    app.view_functions[_VIEW] = view


def place_with_jobs(queues: Sequence[QueueStatus]) -> tuple[str, str]:
    """A queue and one of its registries, not empty if any is not."""
    for registry, count in _COUNTED_IN.items():
        fullest = max(queues, key=lambda queue: int(getattr(queue, count)), default=None)
        if fullest is not None and getattr(fullest, count):
            return fullest.name, registry
    return DEFAULT_QUEUE, "queued"
