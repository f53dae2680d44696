"""The application: the endpoint of each path, and the objects that live as long as the process. Owns start and stop.

It answers / (its name and endpoints), /v1/models (the live workers' models) and /healthz (whether Redis answers)
itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import Failure
from stoker.api.responses import RESPONSES
from stoker.connection import open_connection
from stoker.serve import batches, files, stored_responses
from stoker.serve.backend import Backend, wrong_model
from stoker.serve.batch_runner import BatchRunner
from stoker.serve.connections import LoopErrors
from stoker.serve.generation import generate
from stoker.serve.guard import FILES_PATH, HEALTH_PATHS, ROOT_PATH, Guard
from stoker.serve.metrics import METRICS_PATH, Counted, metrics
from stoker.serve.responses import CLIENT_IS_GONE, Json, failed, given_id, on_error
from stoker.serve.settings import ServeSettings
from stoker.serve.store import BatchStore, FileStore, ResponseStore
from stoker.serve.stored_responses import Background
from stoker_shared.errors import StokerError

_BATCHES_PATH = "/v1/batches"
_RESPONSES_PATH = RESPONSES.url


def build_app(redis_url: str, settings: ServeSettings) -> Starlette:
    """Raises `ValueError`: not a Redis URL; `OSError`: the batch store cannot be made."""
    routes = [Route(url, generate, methods=["POST"]) for url in ENDPOINTS]
    routes += [
        Route("/v1/models", _list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route(ROOT_PATH, _root, methods=["GET"]),
        *(Route(path, _healthz, methods=["GET"]) for path in HEALTH_PATHS),
        Route(METRICS_PATH, metrics, methods=["GET"]),
    ]
    routes += _store_routes()
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
            ),
            Middleware(Counted),
            Middleware(Guard, settings=settings),
        ],
        exception_handlers={
            **dict.fromkeys((Failure, StokerError, OSError, Exception), on_error),
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
        },
        lifespan=_lifespan,
    )
    app.state.backend = Backend(redis_url, settings)
    app.state.background = Background(app.state.backend, ResponseStore(settings.batch_store))
    app.state.files = FileStore(settings.batch_store)
    app.state.batches = BatchStore(settings.batch_store)
    for folders in (app.state.files, app.state.batches):  # those of responses are swept all the time
        folders.remove_remains()
    app.state.runner = BatchRunner(open_connection(redis_url), app.state.batches, app.state.files, settings)
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
        Route(f"{_RESPONSES_PATH}/{{response_id}}", stored_responses.retrieve, methods=["GET"]),
        Route(f"{_RESPONSES_PATH}/{{response_id}}", stored_responses.delete, methods=["DELETE"]),
        Route(f"{_RESPONSES_PATH}/{{response_id}}/cancel", stored_responses.cancel, methods=["POST"]),
        Route(f"{_RESPONSES_PATH}/{{response_id}}/input_items", stored_responses.list_input, methods=["GET"]),
    ]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    app.state.runner.start()
    try:
        await app.state.background.start()
        yield
    finally:
        app.state.runner.stop()
        await app.state.background.aclose()
        await app.state.backend.aclose()


async def _on_hang_up(request: Request, error: Exception) -> Response:
    """The client left before its whole body had arrived."""
    return Response(status_code=CLIENT_IS_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: an unknown path, a wrong method, a form that cannot be read."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    failure = Failure(status, what.get(status, str(getattr(error, "detail", error))), code=code)
    return failed(ENDPOINTS.get(request.url.path), failure, given_id(request.headers))


async def _list_models(request: Request) -> Response:
    """Every loaded model, and every alias of one."""
    return Json({"object": "list", "data": list((await _served(request.app.state.backend)).values())})


async def _model(request: Request) -> Response:
    """Raises `Failure`: no live worker serves the model."""
    name = request.path_params["name"]
    served = await _served(request.app.state.backend)
    if name not in served:
        raise wrong_model(name, sorted(served))
    return Json(served[name])


async def _root(request: Request) -> Response:
    """The server's name and endpoints; clients also request it to see whether a server listens here."""
    others = ("/v1/models", FILES_PATH, _BATCHES_PATH)
    return Json({"name": "stoker serve", "endpoints": [*ENDPOINTS, *others, *HEALTH_PATHS, METRICS_PATH]})


async def _healthz(request: Request) -> Response:
    """200 while Redis answers; workers do not matter. Raises `RedisUnavailable`."""
    await request.app.state.backend.producer.ping()
    return Json({"status": "ok"})


async def _served(backend: Backend) -> dict[str, dict[str, Any]]:
    settings, found = backend.settings, dict[str, dict[str, Any]]()
    for worker in await backend.workers():
        if worker.model is not None:
            found[worker.model] = {
                "id": worker.model,
                "object": "model",
                "created": int(worker.started_at),
                "owned_by": "stoker",
                "max_model_len": worker.context_tokens,
            }
    aliases = settings.body_options.model_aliases
    return found | {theirs: {**found[ours], "id": theirs} for theirs, ours in aliases.items() if ours in found}
