"""`stoker ls` and `stoker workers`: the queues and the workers, as tables. Only command-line texts."""

import time
from dataclasses import asdict

import click

from stoker.command_parts import json_option, open_producer, redis_option, show
from stoker.tables import Table, duration
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
    text = Table(["queue", *_COUNTS, "oldest", "workers"], rows, range(1, 8)).text()
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
    text = Table(heading, rows, range(2, 6)).text() if rows else "no workers"
    show(as_json, {"workers": [asdict(worker) for worker in living]}, text)
