"""Repairs of RQ and rq-dashboard, in three respects: a page of another site must neither read nor change anything, no
text of a job may become part of a page, and a job that cannot be read must not break the page that lists it."""

import json
import secrets
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import rq.serializers
from flask import Flask, Response, abort, request
from jinja2 import ChoiceLoader, DictLoader
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text
from rq_dashboard import web
from werkzeug.routing import BaseConverter

from stoker.connection import address, described
from stoker_shared.errors import JobNotFound, QueueError
from stoker_shared.http_guard import host_name
from stoker_shared.job_data import MAX_DATA_BYTES, MAX_REASON_BYTES, MAX_RESULT_BYTES, is_within_bounds, unpacked

_WRITING_GETS: Final = {"rq_dashboard.requeue_all"}


def refuse_other_names(app: Flask, names: Collection[str]) -> None:
    """Refuse requests to a host that is not in `names`.

    rq-dashboard, in all releases, answers to any name; another site could point its own name at our address, and read
    the pages through the operator's browser.
    """

    def guard() -> Response | None:
        if host_name(request.host) in names:  # Flask's TRUSTED_HOSTS does not support IPv6
            return None
        return _plain(f"this dashboard does not answer to the Host {request.host!r}; --name allows it", 400)

    app.before_request(guard)


def refuse_other_sites(app: Flask) -> None:
    """Refuse requests that change something unless a page of this dashboard made them.

    rq-dashboard, in all releases, trusts every request of the operator's browser, even if another site caused it, and
    it requeues on GET.
    """

    def guard() -> None:
        if request.method not in {"GET", "HEAD"} or request.endpoint in _WRITING_GETS:
            site = request.headers.get("Sec-Fetch-Site")
            origin = request.headers.get("Origin")
            same = (
                site in {"same-origin", "none"} if site else origin is None or urlsplit(origin).netloc == request.host
            )
            if not same:
                abort(403)

    app.before_request(guard)


def escape_names_in_scripts(app: Flask) -> None:
    """Escape the values that templates print into scripts: Flask escapes only in templates named ``*.html``.

    rq-dashboard's script of the jobs page, as of 0.9.0, prints the queue's name between quotes, unescaped. The name
    comes from the address, so a link on another site could run code in the page.
    """
    app.jinja_env.autoescape = True
    script = "rq_dashboard/scripts/jobs.js"
    loader = web.blueprint.jinja_loader
    assert loader is not None
    assert app.jinja_loader is not None
    source, *_ = loader.get_source(app.jinja_env, script)
    as_json = source.replace("'{{ queue.name }}'", "{{ queue.name | tojson }}")  # also for a name with a backslash
    app.jinja_loader = ChoiceLoader([DictLoader({script: as_json}), app.jinja_loader])


_UNDERSCORE: Final = 'underscore-umd-min.js" type="text/javascript"></script>'
# `$(...).text(...)` escapes already; every other expression is escaped here.
_ESCAPE_ALL: Final = r"""<script>_.templateSettings = {
  escape: /<%[-=](?!\s*\$\()([\s\S]+?)%>/g, interpolate: /<%=(\s*\$\([\s\S]+?)%>/g, evaluate: /<%([\s\S]+?)%>/g
};</script>"""


def escape_job_texts(app: Flask) -> None:
    """Escape everything that the templates print.

    rq-dashboard's templates, in all releases, print descriptions, results and metadata of jobs as HTML (``<%= %>``).
    """

    def escape(response: Response) -> Response:
        if _is_page(response):
            response.set_data(response.get_data(as_text=True).replace(_UNDERSCORE, _UNDERSCORE + _ESCAPE_ALL))
        return response

    app.after_request(escape)


def confine_scripts(app: Flask) -> None:
    """Let the browser run only the page's own scripts, and load nothing from elsewhere.

    rq-dashboard, as of 0.9.0, sets no content security policy.
    """

    def confine(response: Response) -> Response:
        response.headers["X-Content-Type-Options"] = "nosniff"
        if _is_page(response):
            nonce = secrets.token_urlsafe(16)
            response.set_data(response.get_data(as_text=True).replace("<script", f'<script nonce="{nonce}"'))
            response.headers["Content-Security-Policy"] = (
                f"default-src 'none'; script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
                "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
        return response

    app.after_request(confine)


def _is_page(response: Response) -> bool:
    return response.mimetype == "text/html" and not response.direct_passthrough


_FITS: Final[Mapping[bytes, Callable[[bytes], bool]]] = {
    b"data": lambda value: len(unpacked(value, MAX_DATA_BYTES)) <= MAX_DATA_BYTES,
    b"exc_info": lambda value: len(unpacked(value, MAX_REASON_BYTES)) <= MAX_REASON_BYTES,
    b"meta": is_within_bounds,
}
"""RQ unpacks and reads these fields without a limit."""


def read_jobs_of_any_client() -> None:
    """Let rq-dashboard read all jobs through `_ReadableJob`, whose methods name the faults they repair."""
    web.Job, web.Queue = _ReadableJob, _ReadableQueue


def encode_unreadable_meta(app: Flask) -> None:
    """Show a remark in place of `meta` that is not JSON.

    RQ leaves such `meta` as bytes; rq-dashboard, since 0.7.1, passes them to an encoder that refuses bytes.
    """
    app.config["RQ_DASHBOARD_JSON_ENCODER"] = _RemarkEncoder


class _ReadableJob(Job):
    @classmethod
    def fetch(cls, id: str, connection: Redis | None = None, serializer: Any = None) -> Job:
        """Read a job with any id.

        RQ 3 raises `ValueError` for ids that earlier releases and other clients used; in rq-dashboard 0.9.0, that
        breaks the page that lists the job.
        """
        job = cls(connection=connection, serializer=serializer)
        job._id = id
        job.refresh()  # type: ignore[no-untyped-call]
        return job

    def restore(self, raw_data: Any) -> None:
        """Read all readable fields, with a remark in place of the description if a field cannot be read.

        RQ, as of 3.0.0, refuses texts that are not UTF-8, and times in any form but its own; in rq-dashboard 0.9.0,
        that breaks the page that lists the job.
        """
        too_long = {name for name, fits in _FITS.items() if not fits(raw_data.get(name, b""))}
        try:
            super().restore({**raw_data, **dict.fromkeys(too_long, b"<too long to be shown>")})
        except NoSuchJobError:
            raise
        except Exception as error:  # RQ even asserts
            self.origin = raw_data.get(b"origin", b"").decode(errors="replace")  # a page lists only its queue's jobs
            self.description = f"<a job that RQ cannot read: {error}>"

    def get_status(self, refresh: bool = True) -> JobStatus:
        """The status that was just read. If asked to read it again, RQ raises for a status that it does not know."""
        return self._status or JobStatus.CREATED

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:
        """The `meta` that was just read. rq-dashboard, since 0.7.1, has it read again, and RQ raises then if it is not
        JSON."""
        return self.meta

    @property
    def dependency_ids(self) -> list[str]:
        """Ids that can be decoded: rq-dashboard, since 0.7.1, calls `decode` on them, but since RQ 3 they are text."""
        return [_DecodableText(key) for key in super().dependency_ids]

    def latest_result(self, timeout: int = 0) -> Result | None:
        """The newest result, with a remark in place of a value that is not JSON; ``None`` if all of it is unreadable.

        In rq-dashboard, since 0.8.1, one unreadable result breaks the page.
        """
        try:
            return _ReadableResult.fetch_latest(self, serializer=_RemarkSerializer, timeout=timeout)
        except (ValueError, KeyError, zlib.error):
            return None


class _ReadableResult(Result):
    @classmethod
    def restore(cls, job_id: str, result_id: str, payload: dict[Any, Any], *args: Any, **others: Any) -> Result:
        """The result, with as much of a failure's text as can be shown."""
        if reason := payload.get(b"exc_string"):
            text = unpacked(b64decode(reason), MAX_REASON_BYTES)
            payload = {**payload, b"exc_string": b64encode(zlib.compress(text))}
        return super().restore(job_id, result_id, payload, *args, **others)


class _ReadableQueue(Queue):
    job_class = _ReadableJob

    @classmethod
    def all(cls, connection: Redis, *args: Any, **others: Any) -> list[Queue]:
        """The queues whose keys are queue names.

        RQ, as of 3.0.0, raises for a key in its set that is not UTF-8 or not that of a queue; that breaks every page
        that lists queues.
        """
        queues = []
        for key in connection.smembers(cls.redis_queues_keys):
            with suppress(ValueError):
                queues.append(cls.from_queue_key(as_text(key), connection, *args, **others))
        return queues


class _DecodableText(str):
    def decode(self, *_: Any) -> str:
        return str(self)


class _RemarkSerializer:
    dumps = JSONSerializer.dumps

    @staticmethod
    def loads(data: bytes) -> Any:
        try:
            return json.loads(unpacked(data, MAX_RESULT_BYTES))
        except (ValueError, RecursionError):
            return _remark(data)


class _RemarkEncoder(json.JSONEncoder):
    def default(self, value: Any) -> Any:
        return _remark(value) if isinstance(value, bytes) else super().default(value)


def _remark(data: bytes) -> str:
    return f"<{len(data)} bytes that are not JSON>"


def never_unpickle() -> None:
    """Make JSON the serializer wherever RQ would choose pickle, with which anyone who can write to Redis could run code
    here.

    Since 0.3.5, rq-dashboard lists workers with RQ's default serializer. Its option ``--json``, there since 0.6.7.2,
    does not reach that page, nor those that show, delete and requeue a job.
    """
    rq.serializers.PickleSerializer = JSONSerializer  # type: ignore[assignment]
    rq.serializers.SERIALIZER_ALIASES["pickle"] = JSONSerializer
    web.config.serializer = JSONSerializer


def find_names_with_slashes(app: Flask) -> None:
    """Let a queue's name or a job's id have slashes. To be called before the routes are added.

    rq-dashboard, in all releases, has no page for the queue ``team/nightly``. The first name of a route gets all
    slashes: the values behind it are a registry, a number or an order.
    """
    app.url_map.converters["default"] = _AnyName
    app.url_map.merge_slashes = False


class _AnyName(BaseConverter):
    regex = "(?s:.+)"
    part_isolating = False


def share_connection(app: Flask, connection: Redis) -> None:
    """Use one pool, with timeouts, for all requests, and give the pages no URL with a password in it.

    Since 0.3.4, rq-dashboard opens a client without timeouts for each request. Since 0.6.1, it shows the URL, masking a
    password before ``@`` but not one in ``?password=``.
    """
    web.from_url = lambda *_, **__: (None, connection)
    app.config["RQ_DASHBOARD_REDIS_URL"] = [f"redis://{address(connection)}"]


def answer_errors_in_one_line(app: Flask, connection: Redis) -> None:
    """Answer 503 while Redis is away, and 404 for a job that is gone.

    rq-dashboard, as of 0.9.0, answers both with 500 and a traceback in its log.
    """
    app.register_error_handler(RedisError, lambda error: _plain(described(connection, error), 503))
    app.register_error_handler(QueueError, lambda error: _plain(str(error), 503))
    for gone in (NoSuchJobError, JobNotFound):
        app.register_error_handler(gone, lambda error: _plain("no such job (any more)", 404))


def _plain(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, content_type="text/plain; charset=utf-8")
