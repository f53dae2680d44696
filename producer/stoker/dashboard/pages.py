"""The dashboard's own templates, and the values that all of its own pages need.

The figures of such a page are in an element `#live`. `live.js` fetches the page again, as often as rq-dashboard's
scripts fetch their data, and replaces that element.
"""

from pathlib import Path
from typing import Any, Final

from flask import Flask, Response, current_app, make_response, render_template, url_for
from jinja2 import ChoiceLoader, FileSystemLoader, PrefixLoader
from rq_dashboard import web
from werkzeug.routing import BaseConverter

_TEMPLATES: Final = Path(__file__).parent / "templates"


def find_own_templates(app: Flask) -> None:
    """Let our templates take the place of rq-dashboard's of the same name, which they find under ``original/``.

    rq-dashboard has no place in its navigation for another page, as of 0.9.0.
    """
    original = PrefixLoader({"original": web.blueprint.jinja_loader})
    app.jinja_loader = ChoiceLoader([FileSystemLoader(_TEMPLATES), original])


def find_names_with_slashes(app: Flask) -> None:
    """Let a queue's name or a job's id have slashes. Before the routes are added.

    rq-dashboard, in all releases, has no page for the queue ``team/nightly``. The first name of a route gets all
    slashes: those after it are a registry, a number or an order.
    """
    app.url_map.converters["default"] = _AnyName
    app.url_map.merge_slashes = False


class _AnyName(BaseConverter):
    regex = "(?s:.+)"
    part_isolating = False


def page(template: str, tab: str, **values: Any) -> Response:
    """A page with these values.

    Args:
        tab: the tab that the navigation marks.
    """
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
