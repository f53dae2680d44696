"""The endpoints /v1/models and /healthz: what the live workers of the queue serve, and whether Redis answers."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stoker.openai.answers import Failure
from stoker.serve.backend import Backend
from stoker.serve.responses import Json, failed
from stoker_shared.errors import RedisUnavailable


async def models(request: Request) -> Response:
    """Every loaded model, and every alias of one."""
    return Json({"object": "list", "data": list((await _served(request.app.state.backend)).values())})


async def model(request: Request) -> Response:
    """
    Raises:
        Failure: no live worker serves it.
    """
    name = request.path_params["name"]
    found = (await _served(request.app.state.backend)).get(name)
    if found is None:
        raise Failure(404, f"no live worker serves the model {name!r}", code="model_not_found", param="model")
    return Json(found)


async def healthz(request: Request) -> Response:
    """200 while Redis answers, else 503; workers do not matter."""
    try:
        await request.app.state.backend.producer.ping()
    except RedisUnavailable as error:
        return failed(Failure(503, str(error), kind="server_error", code="queue_unavailable", retryable=True))
    return Json({"status": "ok"})


async def _served(backend: Backend) -> dict[str, dict[str, Any]]:
    settings, found = backend.settings, dict[str, dict[str, Any]]()
    for worker in await backend.producer.workers():
        if worker.model is not None and settings.queue in worker.queues:
            found[worker.model] = {
                "id": worker.model,
                "object": "model",
                "created": int(worker.started_at),
                "owned_by": "stoker",
                "max_model_len": worker.context_tokens,
            }
    aliases = settings.body_options.model_aliases
    return found | {theirs: {**found[ours], "id": theirs} for theirs, ours in aliases.items() if ours in found}
