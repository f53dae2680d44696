"""The dashboard's own pages: the jobs of a queue, and Stoker in place of the workers. Reads only.

Stoker's figures are in an element `#live`. `live.js` fetches the page again, as often as rq-dashboard's scripts fetch
their data, and replaces that element.
"""

import time
from pathlib import Path
from typing import Any, Final

from flask import Flask, Response, abort, current_app, make_response, render_template, url_for
from jinja2 import ChoiceLoader, FileSystemLoader, PrefixLoader
from redis import Redis
from rq_dashboard import web

from stoker.operations import run
from stoker.overview import overview
from stoker.tables import job_table, queue_table, shared_store_table, trouble_text, worker_table
from stoker_shared.wire import DEFAULT_QUEUE

_TEMPLATES: Final = Path(__file__).parent / "templates"


def find_own_templates(app: Flask) -> None:
    """Let our templates take the place of rq-dashboard's of the same name, which they find under ``original/``.

    rq-dashboard has no place in its navigation for another page, as of 0.9.0.
    """
    original = PrefixLoader({"original": web.blueprint.jinja_loader})
    app.jinja_loader = ChoiceLoader([FileSystemLoader(_TEMPLATES), original])


def open_the_usual_queue(app: Flask) -> None:
    """Open the queue of jobs that name none. rq-dashboard opens ``default``, as of 0.9.0."""
    original = app.view_functions["rq_dashboard.jobs_overview"]

    def view(queue_name: str | None, **others: Any) -> Any:
        return original(queue_name=queue_name or DEFAULT_QUEUE, **others)

    app.view_functions["rq_dashboard.jobs_overview"] = view


def show_stoker_in_place_of_workers(app: Flask, connection: Redis) -> None:
    """Show everything at one moment. rq-dashboard knows neither rates nor the time left, as of 0.9.0.

    Its page of workers, since 0.5.3, shows one job of each as a call with its arguments: the prompt. A dead worker is
    as it was at its last heartbeat, until its registration runs out, and then not there at all.
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
        shown = {"trouble": trouble_text(now), "tables": tables, "dead": dead, "at": at}
        response = make_response(render_template("stoker.html", **shown, **_around_it()))
        response.headers["Cache-Control"] = "no-store"
        return response

    # By this name it is a page of rq-dashboard's blueprint, with all that surrounds them.
    app.add_url_rule("/<int:instance_number>/view/stoker", "rq_dashboard.stoker", view)
    app.view_functions["rq_dashboard.workers_overview"] = view
    app.view_functions["rq_dashboard.list_workers"] = lambda instance_number: abort(404)


def _around_it() -> dict[str, Any]:
    """The values of rq-dashboard's own templates."""
    return {
        "current_instance": 0,
        "instance_list": current_app.config["RQ_DASHBOARD_REDIS_URL"],
        "rq_url_prefix": url_for("rq_dashboard.queues_overview"),
        "rq_dashboard_version": web.rq_dashboard_version,
        "rq_version": web.rq_version,
        "active_tab": "workers",
        "enable_delete": True,
    }
