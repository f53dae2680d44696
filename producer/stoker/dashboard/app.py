"""rq-dashboard's Flask application with all repairs applied. Knows nothing of sockets.

The repairs replace parts of RQ and rq-dashboard in this process, so the dashboard should have a process of its own.
"""

from collections.abc import Collection

from flask import Flask, Response
from redis import Redis
from redis.exceptions import RedisError
from rq.exceptions import NoSuchJobError
from rq_dashboard import web

from stoker.connection import address, described
from stoker.dashboard.job_page import show_progress_of_jobs
from stoker.dashboard.jobs_page import open_a_queue_with_jobs
from stoker.dashboard.page_safety import (
    confine_scripts,
    escape_job_texts,
    escape_names_in_scripts,
    refuse_other_names,
    refuse_other_sites,
)
from stoker.dashboard.pages import find_names_with_slashes, find_own_templates
from stoker.dashboard.readable_jobs import encode_unreadable_meta, read_jobs_of_any_client
from stoker.dashboard.stoker_page import add_stoker_page
from stoker.dashboard.unpickling import never_unpickle
from stoker.dashboard.workers_page import show_workers
from stoker_shared.errors import JobNotFound, QueueError


def build_app(connection: Redis, *, names: Collection[str]) -> Flask:
    """The application on this connection.

    Args:
        names: hosts that a browser may use in its requests, in lower case, IPv6 without brackets.
    """
    app = Flask(web.__name__)
    app.debug = False  # FLASK_DEBUG would offer a console
    never_unpickle()
    share_connection(app, connection)
    read_jobs_of_any_client()
    encode_unreadable_meta(app)
    find_names_with_slashes(app)
    app.register_blueprint(web.blueprint)
    web.setup_rq_connection(app)
    find_own_templates(app)
    escape_names_in_scripts(app)
    open_a_queue_with_jobs(app, connection)
    show_progress_of_jobs(app, connection)
    show_workers(app, connection)
    add_stoker_page(app, connection)
    refuse_other_names(app, names)
    refuse_other_sites(app)
    confine_scripts(app)
    escape_job_texts(app)  # before `confine_scripts`: Flask calls the last one first
    answer_errors_in_one_line(app, connection)
    return app


def share_connection(app: Flask, connection: Redis) -> None:
    """Use one pool, with time-outs, for all requests, and give the pages no URL with a password in it.

    Since 0.3.4, rq-dashboard opens a client without time-outs for each request. Since 0.6.1, it shows the URL, masking
    a password before ``@`` but not one in ``?password=``.
    """
    web.from_url = lambda *_, **__: (None, connection)
    app.config["RQ_DASHBOARD_REDIS_URL"] = [f"redis://{address(connection)}"]


def answer_errors_in_one_line(app: Flask, connection: Redis) -> None:
    """Answer 503 while Redis is away, and 404 for a job that is gone.

    rq-dashboard answers both with 500 and a traceback in its log, as of 0.9.0.
    """
    app.register_error_handler(RedisError, lambda error: _plain(described(connection, error), 503))
    app.register_error_handler(QueueError, lambda error: _plain(str(error), 503))
    for gone in (NoSuchJobError, JobNotFound):
        app.register_error_handler(gone, lambda error: _plain("no such job (any more)", 404))


def _plain(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, content_type="text/plain; charset=utf-8")
