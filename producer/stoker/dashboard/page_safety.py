"""Keeps other sites and texts of jobs out of the dashboard: which requests it answers, and what its pages may run.

A page of another site must neither read nor change anything, and no text of a job may become part of a page.
"""

import secrets
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from flask import Flask, Response, abort, request
from jinja2 import ChoiceLoader, DictLoader
from rq_dashboard import web

from stoker_shared.http_guard import host_name

_WRITING_GETS: Final = {"rq_dashboard.requeue_all"}


def refuse_other_names(app: Flask, names: Collection[str]) -> None:
    """Refuse requests to a host that is not in `names`.

    rq-dashboard, in all releases, answers to any name; another site could point its own name at our address, and read
    the pages through the operator's browser.
    """

    def guard() -> Response | None:
        if host_name(request.host) in names:  # Flask's TRUSTED_HOSTS does not know IPv6
            return None
        text = f"this dashboard does not answer to the Host {request.host!r}; --name allows it\n"
        return Response(text, 400, content_type="text/plain; charset=utf-8")

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
    """Escape what templates print into scripts: Flask escapes only in templates named ``*.html``.

    rq-dashboard's script of the jobs page, as of 0.9.0, prints the queue's name between quotes as it is. The name
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

    rq-dashboard's templates print descriptions, results and metadata of jobs as HTML (``<%= %>``), in all releases.
    """

    def escape(response: Response) -> Response:
        if _is_page(response):
            response.set_data(response.get_data(as_text=True).replace(_UNDERSCORE, _UNDERSCORE + _ESCAPE_ALL))
        return response

    app.after_request(escape)


def confine_scripts(app: Flask) -> None:
    """Let the browser run no scripts but the page's own, and load nothing from elsewhere.

    rq-dashboard sets no content security policy, as of 0.9.0.
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
