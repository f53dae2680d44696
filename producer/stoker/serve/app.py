"""The application: which path is which endpoint, and what lives as long as the process. Owns start and stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stoker.connection import open_connection
from stoker.openai.answers import Failure
from stoker.openai.fields import RULES, FieldRefused
from stoker.serve import batches, files, models
from stoker.serve.backend import Backend
from stoker.serve.batch_runner import BatchRunner
from stoker.serve.batch_store import BatchStore
from stoker.serve.connections import LoopErrors
from stoker.serve.file_store import FileStore
from stoker.serve.generation import generate
from stoker.serve.guard import FILES_PATH, HEALTH_PATH, Guard
from stoker.serve.responses import CLIENT_IS_GONE, failed, on_error
from stoker.serve.settings import ServeSettings
from stoker_shared.errors import StokerError

_BATCHES_PATH = "/v1/batches"


def build_app(redis_url: str, settings: ServeSettings) -> Starlette:
    """
    Raises:
        ValueError: not a Redis URL.
        OSError: the batch store cannot be made.
    """
    routes = [Route(url, generate, methods=["POST"]) for url in RULES]
    routes += [
        Route("/v1/models", models.models, methods=["GET"]),
        Route("/v1/models/{name:path}", models.model, methods=["GET"]),
        Route(HEALTH_PATH, models.healthz, methods=["GET"]),
    ]
    if settings.batch_store is not None:
        routes += _store_routes()
    limits = {"max_body_bytes": settings.max_body_bytes, "max_file_bytes": settings.max_file_bytes}
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, tokens=settings.tokens, **limits)],
        exception_handlers={
            **dict.fromkeys((Failure, FieldRefused, StokerError, Exception), on_error),
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
        },
        lifespan=_lifespan,
    )
    app.state.backend = Backend(redis_url, settings)
    app.state.runner = None
    if settings.batch_store is not None:
        app.state.files = FileStore(settings.batch_store)
        app.state.batches = BatchStore(settings.batch_store)
        stores = (app.state.batches, app.state.files)
        app.state.runner = BatchRunner(open_connection(redis_url), *stores, settings)
    return app


def _store_routes() -> list[Route]:
    return [
        Route(FILES_PATH, files.upload, methods=["POST"]),
        Route(FILES_PATH, files.list_files, methods=["GET"]),
        Route(f"{FILES_PATH}/{{file_id}}", files.retrieve, methods=["GET"]),
        Route(f"{FILES_PATH}/{{file_id}}", files.delete, methods=["DELETE"]),
        Route(f"{FILES_PATH}/{{file_id}}/content", files.content, methods=["GET"]),
        Route(_BATCHES_PATH, batches.create, methods=["POST"]),
        Route(_BATCHES_PATH, batches.list_batches, methods=["GET"]),
        Route(f"{_BATCHES_PATH}/{{batch_id}}", batches.retrieve, methods=["GET"]),
        Route(f"{_BATCHES_PATH}/{{batch_id}}/cancel", batches.cancel, methods=["POST"]),
    ]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    runner: BatchRunner | None = app.state.runner
    if runner is not None:
        runner.start()
    try:
        yield
    finally:
        if runner is not None:
            runner.stop()
        await app.state.backend.aclose()


async def _on_hang_up(request: Request, error: Exception) -> Response:
    """The client was gone before its body had come."""
    return Response(status_code=CLIENT_IS_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: an unknown path, a wrong method, a form that cannot be read."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    return failed(Failure(status, what.get(status, str(getattr(error, "detail", error))), code=code))
