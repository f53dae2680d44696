"""The dashboard's own pages: the jobs of a queue, one job, and Stoker in place of the workers. Reads only.

The figures of such a page are in an element `#live`. `live.js` fetches the page again, as often as rq-dashboard's
scripts fetch their data, and replaces that element.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flask import Flask, Response, abort, current_app, make_response, render_template, url_for
from jinja2 import ChoiceLoader, FileSystemLoader, PrefixLoader
from redis import Redis
from rq.job import Job
from rq_dashboard import web

from stoker.command_parts import status_text
from stoker.operations import Operation, ask, run
from stoker.overview import QueueStatus, overview, queues_now
from stoker.presence import is_ours, live_workers
from stoker.tables import (
    DEAD,
    job_table,
    queue_table,
    rate_text,
    shared_store_table,
    trouble_text,
    worker_table,
)
from stoker.tickets import status_of
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.wire import DEFAULT_QUEUE, REQUEST_KWARG

_TEMPLATES: Final = Path(__file__).parent / "templates"


def find_own_templates(app: Flask) -> None:
    """Let our templates replace rq-dashboard's of the same name, which remain available under ``original/``.

    rq-dashboard, as of 0.9.0, has no place in its navigation for another page.
    """
    original = PrefixLoader({"original": web.blueprint.jinja_loader})
    app.jinja_loader = ChoiceLoader([FileSystemLoader(_TEMPLATES), original])


def page(template: str, tab: str, **values: Any) -> Response:
    """A page with these values; the navigation marks `tab`."""
    shared = {
        "current_instance": 0,
        "instance_list": current_app.config["RQ_DASHBOARD_REDIS_URL"],
        "rq_url_prefix": url_for("rq_dashboard.queues_overview"),
        "rq_dashboard_version": web.rq_dashboard_version,
        "rq_version": web.rq_version,
        "active_tab": tab,
        "enable_delete": True,
    }
    response = make_response(render_template(template, **shared, **values))
    response.headers["Cache-Control"] = "no-store"
    return response


_LEFT_BEHIND: Final = "no heartbeat: the next worker that runs puts the job back; below are its last figures"


def show_progress_of_jobs(app: Flask, connection: Redis) -> None:
    """Show a job's agent, its place in the queue or its worker, stage, tokens and rate.

    rq-dashboard, as of 0.9.0, shows only that a running job is ``started``, and its raw ``meta``.
    """
    app.view_functions["rq_dashboard.job_view"] = lambda instance_number, job_id: page(
        "stoker_job.html", "jobs", id=job_id, facts=run(connection, facts_of(job_id))
    )


def facts_of(job_id: str) -> Operation[list[tuple[str, str]]]:
    """Labels and texts of a job. Raises `JobNotFound`: the job does not exist (any more)."""
    status = yield from status_of(job_id)
    data = yield from ask("HGET", Job.key_for(job_id), "data")
    living = {worker.name for worker in (yield from live_workers())}
    state = status_text(replace(status, worker=None, stage=None, tokens=None))
    facts = [("State", state), ("Agent", _agent(data or b"") or "none")]
    if status.worker:
        facts.append(("Worker", status.worker))
        if is_ours(status.worker) and status.worker not in living:
            facts.append((DEAD, _LEFT_BEHIND))
    if status.stage:
        facts.append(("Stage", status.stage))
        facts.append(("Tokens", str(status.tokens)))
        facts.append(("Rate", f"{rate_text(status.tokens_per_s or 0.0)} tokens/s"))
    return facts


def _agent(data: bytes) -> str | None:
    try:
        *_, kwargs = read_json(unpacked(data), MAX_DATA_BYTES)
        agent = kwargs[REQUEST_KWARG]["agent_id"]
    except (ValueError, TypeError, KeyError):  # not a job of stoker's
        return None
    return agent if isinstance(agent, str) else None


_VIEW: Final = "rq_dashboard.jobs_overview"
_COUNTED_IN: Final = {
    "queued": "waiting",
    "started": "running",
    "scheduled": "scheduled",
    "deferred": "deferred",
    "failed": "failed",
    "finished": "finished",
}
"""RQ's registries by rq-dashboard's names, in the order of the search, and our counts of their jobs."""


def open_a_queue_with_jobs(app: Flask, connection: Redis) -> None:
    """Open the queue with the most waiting jobs, or else the most running ones.

    rq-dashboard, as of 0.9.0, opens the queue ``default`` with "No jobs", however many other queues have.
    """
    original = app.view_functions[_VIEW]

    def view(queue_name: str | None, registry_name: str, **others: Any) -> Any:
        if queue_name is None:
            queue_name, registry_name = place_with_jobs(run(connection, queues_now()))
        return original(queue_name=queue_name, registry_name=registry_name, **others)

    app.view_functions[_VIEW] = view


def place_with_jobs(queues: Sequence[QueueStatus]) -> tuple[str, str]:
    """A queue and one of its registries, with jobs if any has some."""
    for registry, count in _COUNTED_IN.items():
        fullest = max(queues, key=lambda queue: int(getattr(queue, count)), default=None)
        if fullest is not None and getattr(fullest, count):
            return fullest.name, registry
    return DEFAULT_QUEUE, "queued"


def show_stoker_in_place_of_workers(app: Flask, connection: Redis) -> None:
    """Show everything at one moment. rq-dashboard, as of 0.9.0, has neither rates nor the time left.

    Its page of workers, since 0.5.3, shows each worker's job as a call with its arguments, which include the prompt. It
    shows a dead worker as it was at its last heartbeat, until its registration expires, and then no more.
    """

    def view(instance_number: int) -> Response:
        now = run(connection, overview())
        tables = [
            ("Queues", queue_table(now.queues), "no queues"),
            ("Workers", worker_table(now.workers), "no workers"),
            ("Shared store", shared_store_table(now.workers), "none"),
            ("Running the longest", job_table(now.slowest), "no jobs"),
        ]
        dead = {worker.name for worker in now.workers if not worker.is_alive}
        at = time.strftime("%H:%M:%S")
        return page("stoker.html", "workers", trouble=trouble_text(now), tables=tables, dead=dead, at=at)

    # By this name it is a page of rq-dashboard's blueprint, with everything that surrounds such pages.
    app.add_url_rule("/<int:instance_number>/view/stoker", "rq_dashboard.stoker", view)
    app.view_functions["rq_dashboard.workers_overview"] = view
    app.view_functions["rq_dashboard.list_workers"] = lambda instance_number: abort(404)
