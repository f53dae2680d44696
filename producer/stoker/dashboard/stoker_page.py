"""The dashboard's page with the figures of `stoker status`. Reads only."""

import time

from flask import Flask, Response
from redis import Redis

from stoker.dashboard.pages import page
from stoker.operations import run
from stoker.overview import overview
from stoker.tables import (
    job_table,
    queue_table,
    shared_store_table,
    trouble_text,
    worker_table,
)


def add_stoker_page(app: Flask, connection: Redis) -> None:
    """Show everything at one moment. rq-dashboard knows neither rates nor the time left, as of 0.9.0."""

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
        return page("stoker.html", "stoker", trouble=trouble_text(now), tables=tables, dead=dead, at=at)

    # By this name it is a page of rq-dashboard's blueprint, with all that surrounds them.
    app.add_url_rule("/<int:instance_number>/view/stoker", "rq_dashboard.stoker", view)
