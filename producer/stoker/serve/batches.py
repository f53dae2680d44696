"""The endpoints /v1/batches: create, list, retrieve and cancel. They only read and write the store; `batch_runner` runs
the batches, here or in another process."""

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from stoker.api.endpoints import BATCH_URLS
from stoker.api.failure import Failure
from stoker.batch.record import read_record
from stoker.serve.responses import Json, json_object, page_of, received
from stoker.serve.store import BatchState, BatchStore, StoredBatch
from stoker_shared.text import seconds_of

_TIMES: Final = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
_FIELDS: Final = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})


async def create(request: Request) -> Response:
    """Raises `Failure`: a field is missing, unknown or invalid."""
    async with received(request) as raw:
        raw.seek(0)
        body = json_object(raw.read())
    owner, endpoint, file_id = request.state.owner, body.get("endpoint"), body.get("input_file_id")
    if unknown := sorted(set(body) - _FIELDS):
        raise _bad(unknown[0][:64], "is not a known field of /v1/batches", "unknown_parameter")
    if not isinstance(endpoint, str) or endpoint not in BATCH_URLS:
        raise _bad("endpoint", f"must be one of {', '.join(BATCH_URLS)}")
    if not isinstance(file_id, str):
        raise _bad("input_file_id", "must be the id of a file")
    if body.get("output_expires_after") is not None:
        raise _bad("output_expires_after", "is not served: files stay until they are deleted", "unsupported_parameter")
    window, metadata = str(body.get("completion_window", "")), body.get("metadata")
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise _bad("metadata", "must be an object of strings")
    try:
        window_s = seconds_of(window, needs_unit=True)
    except ValueError as error:
        raise _bad("completion_window", f"is invalid: {error}") from None
    file = await asyncio.to_thread(request.app.state.files.get, owner, file_id)
    batches: BatchStore = request.app.state.batches
    asked = {"endpoint": endpoint, "input_file_id": file.id, "completion_window": window, "metadata": metadata}
    batch = await asyncio.to_thread(batches.add, owner, window_s=window_s, **asked)
    request.app.state.runner.look()
    return Json(_as_object(batch, BatchState()))


async def list_batches(request: Request) -> Response:
    """Newest first."""
    batches: BatchStore = request.app.state.batches
    found = await asyncio.to_thread(batches.all_of, request.state.owner)
    page = page_of([{"id": batch.id, "batch": batch} for batch in found], request.query_params, most=100)
    data: list[dict[str, Any]] = []
    for entry in page["data"]:
        with batches.leaving_out(entry["id"]):
            data.append(await _now(request, entry["batch"]))
    return Json({**page, "data": data})


async def retrieve(request: Request) -> Response:
    return Json(await _now(request, await _batch(request)))


async def cancel(request: Request) -> Response:
    """Lines that have ended keep their answers, the others become errors."""
    batch = await _batch(request)
    batches: BatchStore = request.app.state.batches
    if not (await asyncio.to_thread(batches.state, batch.id)).has_ended:
        await asyncio.to_thread(batches.cancel, batch.id)
        request.app.state.runner.look()
    return Json(await _now(request, batch))


async def _batch(request: Request) -> StoredBatch:
    batches: BatchStore = request.app.state.batches
    return await asyncio.to_thread(batches.get, request.state.owner, request.path_params["batch_id"])


async def _now(request: Request, batch: StoredBatch) -> dict[str, Any]:
    state = await asyncio.to_thread(request.app.state.batches.state, batch.id)
    if state.has_ended or not state.total:
        return _as_object(batch, state)
    record = await request.app.state.backend.run(read_record(batch.id))
    if record is None:
        return _as_object(batch, state)
    counts = {"completed": record.n_taken - record.n_failed, "failed": record.n_failed}
    is_finalizing = state.status == "in_progress" and record.n_taken >= state.total
    return _as_object(batch, state, counts, "finalizing" if is_finalizing else state.status)


def _as_object(
    batch: StoredBatch, state: BatchState, counts: dict[str, int] | None = None, status: str | None = None
) -> dict[str, Any]:
    counts = counts or {"completed": state.completed, "failed": state.failed}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": state.errors} if state.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status or state.status,
        "output_file_id": state.output_file_id,
        "error_file_id": state.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: state.times.get(name) for name in _TIMES},
        "request_counts": {"total": state.total, **counts},
        "metadata": batch.metadata,
    }


def _bad(name: str, why: str, code: str = "invalid_value") -> Failure:
    return Failure(400, f"'{name}' {why}", code=code, param=name)
