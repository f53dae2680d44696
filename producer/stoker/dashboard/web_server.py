"""Werkzeug's server, with limits: a thread for each connection, which it closes after an answer."""

from typing import Any

from flask import Flask
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from stoker_shared.http_guard import LimitedHead, LimitedThreads


class WebServer(LimitedThreads, ThreadedWSGIServer):
    def __init__(self, bind: str, port: int, app: Flask) -> None:
        super().__init__(bind, port, app, _Handler)


class _Handler(LimitedHead, WSGIRequestHandler):
    def log_error(self, *_: Any) -> None:
        """Anybody can cause a line by a request that is none; errors of a page are logged elsewhere."""
