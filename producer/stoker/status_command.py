"""`stoker status` and `workers`: one job, everything at one moment, workers. Only command-line texts."""

import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Final

import click

from stoker.command_parts import json_option, open_producer, redis_option, show, status_text, ticket_of
from stoker.overview import Overview
from stoker.producer import Producer
from stoker.tables import (
    Table,
    duration,
    job_table,
    queue_table,
    shared_store_table,
    trouble_text,
    worker_table,
)
from stoker_shared.errors import QueueError
from stoker_shared.help_layout import LaidOutCommand, examples
from stoker_shared.text import printable


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


EVERY_S: Final = 1.0


@click.command(
    cls=LaidOutCommand,
    epilog=examples("stoker status", "stoker status --watch", "stoker status --json | jq '.queues[].left_s'",
                    "stoker status JOB_ID"),
)  # fmt: skip
@click.argument("job_id", required=False)
@click.option("--watch", is_flag=True, help="Redraw everything every second, until Ctrl-C.")
@json_option
@redis_option
@click.pass_obj
def status(redis_url: str, job_id: str | None, watch: bool, as_json: bool) -> None:
    """Print whether a job is waiting, running or ended.

    Without a job, show the whole system: for each queue the oldest wait and the time that is left at the present rate;
    the workers, a dead one too; and the jobs that have run the longest.
    """
    if watch and (job_id is not None or as_json):
        raise click.UsageError("--watch shows the whole, as text: give it neither a job nor --json")
    with open_producer(redis_url) as producer:
        if watch:
            _watch(producer)
        elif job_id is None:
            now = producer.overview()
            show(as_json, asdict(now), overview_text(now))
        else:
            of_job = ticket_of(producer, job_id).status()
            show(as_json, {"job_id": job_id, **asdict(of_job)}, status_text(of_job))


def _watch(producer: Producer) -> None:
    with suppress(KeyboardInterrupt):
        while True:
            try:
                text = overview_text(producer.overview())
            except QueueError as error:
                text = printable(str(error), lines=True)
            text = f"{text}\n\n{time.strftime('%H:%M:%S')}, each second; Ctrl-C ends"
            if sys.stdout.isatty():  # a longer text would scroll its beginning out of sight
                columns, lines = shutil.get_terminal_size()
                text = "\n".join(line[:columns] for line in text.split("\n")[: lines - 1])
            click.clear()  # clears a terminal only; elsewhere the texts follow each other
            click.echo(text)
            time.sleep(EVERY_S)


def overview_text(now: Overview) -> str:
    queues, workers = queue_table(now.queues), worker_table(now.workers)
    parts = [trouble] if (trouble := trouble_text(now)) else []
    parts += [queues.text() if queues.rows else "no queues", workers.text() if workers.rows else "no workers"]
    if (shared := shared_store_table(now.workers)).rows:
        parts.append(shared.text())
    if now.slowest:
        parts.append(f"running the longest:\n{job_table(now.slowest).text()}")
    return printable("\n\n".join(parts), lines=True)
