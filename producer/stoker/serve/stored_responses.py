"""The endpoints below /v1/responses/ID, and the removal of old responses."""

import asyncio
import logging
from typing import Final, NoReturn

from starlette.requests import Request
from starlette.responses import Response

from stoker.api.failure import Failure
from stoker.serve.responses import Json
from stoker.serve.store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

_SWEEP_S: Final = 60.0


async def sweep_often(store: ResponseStore) -> NoReturn:
    """Remove old responses each minute."""
    while True:
        try:
            await asyncio.to_thread(store.sweep)
        except OSError as error:
            log.error("old responses cannot be removed: %s", error)
        await asyncio.sleep(_SWEEP_S)


async def retrieve(request: Request) -> Response:
    """
    Raises:
        Failure: no such response, or none yet, or it is to be streamed.
    """
    if request.query_params.get("stream", "false") != "false":
        raise Failure(
            400, "'stream' is not served here: retrieve it without", code="unsupported_parameter", param="stream"
        )
    response, store = await _response(request), _store(request)
    answer = await asyncio.to_thread(store.answer, response.id)
    if answer is None:
        raise Failure(404, f"{response.id!r} has no answer yet", code="response_not_found", param="response_id")
    return Json(answer)


async def delete(request: Request) -> Response:
    response = await _response(request)
    await asyncio.to_thread(_store(request).remove, response.id)
    return Json({"id": response.id, "object": "response", "deleted": True})


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.backend.store
    return store


async def _response(request: Request) -> StoredResponse:
    return await asyncio.to_thread(_store(request).get, request.state.owner, request.path_params["response_id"])
