"""rq-dashboard's Flask application, mended from outside: it works on our jobs and trusts nothing that is in them.

Owns what rq-dashboard 0.9 gets wrong with RQ 3, JSON jobs and strangers' text. Nothing in site-packages is changed:
what is replaced is replaced in this process, which should be one of its own. Knows nothing of sockets.
"""

import json
import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

import rq.serializers
from flask import Flask, Response, abort, request
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker
from rq_dashboard import web

from stoker.connection import address, in_our_words
from stoker.job_record import fields_of, progress_in, without_packing

_SHOWN_JOBS = 4
_WRITING_GETS = {"rq_dashboard.requeue_all"}
_UNDERSCORE = 'underscore-umd-min.js" type="text/javascript"></script>'
# rq-dashboard's templates print job texts raw (<%= %>). Everything is escaped but what they put through $().text().
_ESCAPE_ALL = r"""<script>_.templateSettings = {
  escape: /<%[-=](?!\s*\$\()([\s\S]+?)%>/g, interpolate: /<%=(\s*\$\([\s\S]+?)%>/g, evaluate: /<%([\s\S]+?)%>/g
};</script>"""


def build_app(connection: Redis, *, names: Collection[str]) -> Flask:
    """
    Args:
        names: hosts a browser may call it by, IPv6 without brackets. Another is refused: it could be a stranger's
            that was pointed at our address, to read us through the operator's browser.
    """
    _never_unpickle()
    web.from_url = lambda *_, **__: (
        None,
        connection,
    )  # one pool, our time-outs, and no URL with its password in a page
    web.Job, web.Queue = _ReadableJob, _ReadableQueue
    app = Flask(web.__name__)
    app.debug = False  # whatever FLASK_DEBUG says
    app.config.update(
        RQ_DASHBOARD_REDIS_URL=[f"redis://{address(connection)}"],
        RQ_DASHBOARD_JSON_ENCODER=_ReadableEncoder,
    )
    app.register_blueprint(web.blueprint)
    web.setup_rq_connection(app)
    app.view_functions["rq_dashboard.list_workers"] = web.jsonify(lambda instance_number: _workers(connection))
    app.before_request(lambda: _refuse_other_names(names))
    app.before_request(_refuse_other_sites)
    app.after_request(_contain)
    app.register_error_handler(RedisError, lambda error: _plain(in_our_words(connection, error), 503))
    app.register_error_handler(NoSuchJobError, lambda error: _plain("no such job (any more)", 404))
    return app


def _never_unpickle() -> None:
    """Whoever can write to Redis could otherwise run code here. rq-dashboard's own --json forgets the workers page."""
    rq.serializers.PickleSerializer = JSONSerializer  # type: ignore[assignment]
    rq.serializers.SERIALIZER_ALIASES["pickle"] = JSONSerializer
    web.config.serializer = JSONSerializer


class _ReadableJson:
    """For results: what is not JSON is shown as a remark, and does not take a whole page down."""

    dumps = JSONSerializer.dumps

    @staticmethod
    def loads(data: bytes) -> Any:
        try:
            return json.loads(without_packing(data))
        except (ValueError, RecursionError):
            return f"<{len(data)} bytes that are not JSON>"


class _ReadableEncoder(json.JSONEncoder):
    """For `meta`, which RQ leaves as bytes when it cannot read it."""

    def default(self, value: Any) -> Any:
        return f"<{len(value)} bytes that are not JSON>" if isinstance(value, bytes) else super().default(value)


class _Bytelike(str):
    """rq-dashboard calls `decode` on dependency ids, which are text since RQ 3."""

    def decode(self, *_: Any) -> str:
        return str(self)


class _ReadableJob(Job):
    """A job as the pages read it."""

    @classmethod
    def fetch(cls, id: str, connection: Redis | None = None, serializer: Any = None) -> Job:
        """RQ's own raises for an id it does not allow, and the page with all the others is gone."""
        job = cls(connection=connection, serializer=serializer)
        job._id = id
        job.refresh()  # type: ignore[no-untyped-call]
        return job

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:
        return self.meta  # just read, and bytes where it is not JSON; a second reading would raise

    @property
    def dependency_ids(self) -> list[str]:
        return [_Bytelike(key) for key in super().dependency_ids]

    def latest_result(self, timeout: int = 0) -> Result | None:
        return Result.fetch_latest(self, serializer=_ReadableJson, timeout=timeout)


class _ReadableQueue(Queue):
    job_class = _ReadableJob


def _workers(connection: Redis) -> dict[str, Any]:
    """The workers page's rows. rq-dashboard's own shows one job of each worker, and its arguments: the prompt."""
    rows = [_worker_row(connection, worker) for worker in Worker.all(connection=connection)]
    return {"workers": sorted(rows, key=lambda row: (row["state"], row["queues"], row["name"]))}


def _worker_row(connection: Redis, worker: BaseWorker) -> dict[str, Any]:
    running = [execution.job_id for execution in worker.get_current_executions()]
    return {
        "name": worker.name,
        "pid": worker.pid,
        "hostname": worker.hostname,
        "queues": [queue.name for queue in worker.queues],
        "state": worker.get_state(),
        "current_job": _current_jobs(connection, worker.get_state(), running) if running else "idle",
        "current_job_ids": running,
        "last_heartbeat": worker.last_heartbeat,
        "birth_date": worker.birth_date,
        "successful_job_count": worker.successful_job_count,
        "failed_job_count": worker.failed_job_count,
        "total_working_time": worker.total_working_time,
        "version": worker.version,
        "python_version": worker.python_version,
    }


def _current_jobs(connection: Redis, state: str, job_ids: list[str]) -> dict[str, str]:
    """The template's one job: it links to the first, and its text says how many there are."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids[:_SHOWN_JOBS]:
            pipeline.hmget(Job.key_for(job_id), "description", "created_at", "meta")
        found = [[value or b"" for value in reply] for reply in pipeline.execute()]
    shown = [
        (_described(description, meta), created_at.decode(errors="replace")) for description, created_at, meta in found
    ]
    descriptions = "; ".join(description for description, _ in shown)
    more = f"; and {len(job_ids) - _SHOWN_JOBS} more" if len(job_ids) > _SHOWN_JOBS else ""
    jobs = "1 job" if len(job_ids) == 1 else f"{len(job_ids)} jobs"
    return {
        "job_id": job_ids[0],
        "description": descriptions + more,
        "created_at": shown[0][1],
        "call_string": f"{state}, {jobs}: {descriptions}{more}",
    }


def _described(description: bytes, meta: bytes) -> str:
    text = description.decode(errors="replace")
    progress = progress_in(fields_of(meta))
    if progress is None:
        return text
    return f"{text} ({progress.stage}, {progress.tokens} tokens, {progress.tokens_per_s:g}/s)"


def _refuse_other_names(names: Collection[str]) -> None:
    if urlsplit(f"//{request.host}").hostname not in names:  # Flask's TRUSTED_HOSTS knows no IPv6
        abort(400)


def _refuse_other_sites() -> None:
    """A page of another site may make the operator's browser send requests here, without asking."""
    if request.method not in {"GET", "HEAD"} or request.endpoint in _WRITING_GETS:
        site = request.headers.get("Sec-Fetch-Site")
        origin = request.headers.get("Origin")
        same = site in {"same-origin", "none"} if site else origin is None or urlsplit(origin).netloc == request.host
        if not same:
            abort(403)


def _contain(response: Response) -> Response:
    """Escape what pages print, and let no script run but those the pages came with."""
    response.headers["X-Content-Type-Options"] = "nosniff"
    if response.mimetype == "text/html" and not response.direct_passthrough:
        nonce = secrets.token_urlsafe(16)
        page = response.get_data(as_text=True).replace(_UNDERSCORE, _UNDERSCORE + _ESCAPE_ALL)
        response.set_data(page.replace("<script", f'<script nonce="{nonce}"'))
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
            "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
    return response


def _plain(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, content_type="text/plain; charset=utf-8")
