"""The server's counts for Prometheus: requests by path and status, their time, and the number of open ones."""

import time
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METRICS_PATH: Final = "/metrics"
_SECONDS: Final = (0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_requests = Counter("stoker_serve_requests", "Requests that were answered.", ["path", "status"])
_open = Gauge("stoker_serve_requests_open", "Requests whose answer is not complete.")
_begins = Histogram("stoker_serve_first_byte_seconds", "Time until an answer begins.", ["path"], buckets=_SECONDS)
_takes = Histogram("stoker_serve_request_seconds", "Time to the end of an answer.", ["path"], buckets=_SECONDS)


class Counted:
    """ASGI middleware. A path that the application does not have counts as ``other``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _begins.labels(_path(scope)).observe(time.perf_counter() - began)
            await send(message)

        with _open.track_inprogress():
            try:
                await self._app(scope, receive, counted)
            finally:
                _takes.labels(_path(scope)).observe(time.perf_counter() - began)
                _requests.labels(_path(scope), status or "hung up").inc()


def _path(scope: Scope) -> str:
    """The route's path, so that ids make no series of their own."""
    route = scope.get("route")
    return getattr(route, "path", "other")


async def metrics(request: Request) -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
