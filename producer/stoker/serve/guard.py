"""Lets in only authorized callers, and no more bytes than allowed. ASGI middleware around the whole application.

Without tokens, every program on this machine may call. Web pages in its browsers may not: a request with the name or
the origin of another site is refused, unless the origin is an allowed one.
"""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import Failure
from stoker.serve.responses import failed, given_id
from stoker.serve.settings import ANYBODY, ServeSettings
from stoker_shared.http_guard import is_own_site

HEALTH_PATHS: Final = ("/healthz", "/health")
ROOT_PATH: Final = "/"
FILES_PATH: Final = "/v1/files"
_API_KEY_HEADER: Final = "x-api-key"
"""The header in which Anthropic's clients send their token."""

_OTHER_BYTES: Final = 64 * 2**10
"""Largest body of a request that is neither a call nor an upload."""


class Guard:
    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._tokens = settings.tokens
        self._origins = settings.allowed_origins
        self._most = {**dict.fromkeys(ENDPOINTS, settings.max_body_bytes), FILES_PATH: settings.max_file_bytes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        most = self._most.get(scope["path"], _OTHER_BYTES)
        try:
            scope.setdefault("state", {})["owner"] = self._owner(scope["path"], headers)
            if int(headers.get("content-length") or 0) > most:
                raise _too_large(most)
        except Failure as failure:
            return await failed(ENDPOINTS.get(scope["path"]), failure, given_id(headers))(scope, receive, send)
        return await self._app(scope, _counted(receive, most), send)

    def _owner(self, path: str, headers: Headers) -> str:
        """The name of the caller's token. Raises `Failure`: the caller is not authorized."""
        if self._tokens is None:
            origin = headers.get("origin")
            if not is_own_site(headers.get("host"), None if origin in self._origins else origin):
                raise Failure(403, "without tokens, only programs on this machine may call, by its loopback address")
            return ANYBODY
        if path in (*HEALTH_PATHS, ROOT_PATH):
            return ANYBODY
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get(_API_KEY_HEADER, "")
        name = self._tokens.name_of(token.strip())
        if name is None:
            raise Failure(401, "a bearer token is needed, and it must be a valid one", code="invalid_api_key")
        return name


def _counted(receive: Receive, most: int) -> Receive:
    """`receive` with a limit for a body whose length is missing or wrong."""
    n_bytes = 0

    async def counted() -> Message:
        nonlocal n_bytes
        message = await receive()
        n_bytes += len(message.get("body", b""))
        if n_bytes > most:
            raise _too_large(most)
        return message

    return counted


def _too_large(most: int) -> Failure:
    return Failure(413, f"the body is over {most} bytes", code="request_too_large")
