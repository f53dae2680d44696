"""The endpoints below /v1/responses/ID, and the end of responses whose client does not wait for them.

Owns the tasks that wait for background jobs. Another process with the same store may wait for the same job: both write
the same answer.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from stoker.api.failure import Failure, of_exception
from stoker.api.responses import ended_response, failed_response, frame, input_items
from stoker.serve.backend import Backend
from stoker.serve.responses import Json, page_of
from stoker.serve.store import ResponseStore, StoredResponse
from stoker_shared.errors import JobCanceled, JobNotFound, RedisUnavailable, ResultTimeout, StokerError

log = logging.getLogger(__name__)

_AGAIN_S: Final = 5.0
_SWEEP_S: Final = 60.0
_ENQUEUED_S: Final = 60.0
"""The job of an older response has been enqueued, or never will be."""
_WAITING: Final = frozenset({"queued", "deferred", "scheduled"})
"""States of a job that does not run yet."""


class Background:
    """The waits for background responses. For one event loop; `store` blocks, so it is used in other threads."""

    def __init__(self, backend: Backend, store: ResponseStore) -> None:
        self.store = store
        self._backend = backend
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait for the jobs of background responses without an answer, and remove old responses from time to time."""
        self._begin(self._sweep())
        for response in await asyncio.to_thread(self.store.unanswered):
            self.wait_for(response)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begun(self, owner: str, response_id: str, *, is_new: bool) -> dict[str, Any]:
        """The response whose job was enqueued, as its client sees it now. `is_new`: this call stored it, not an earlier
        one with the same key."""
        response = await asyncio.to_thread(self.store.get, owner, response_id)
        self.wait_for(response)
        return _frame_of(response, "queued") if is_new else await self.now(response)

    async def now(self, response: StoredResponse) -> dict[str, Any]:
        """A response as its client sees it."""
        answer = await asyncio.to_thread(self.store.answer, response.id)
        if answer is not None:
            return answer
        try:
            answer = await _answer_of(self._backend, response, timeout_s=0)
        except ResultTimeout:
            state = (await self._backend.ticket(response.job_id).status()).state
            return _frame_of(response, "queued" if state in _WAITING else "in_progress")
        if answer["status"] != "failed":  # a job that is not enqueued yet looks like that, too
            with suppress(OSError):  # nobody else stores it if its client, or the process of its call, is gone
                await asyncio.to_thread(self.store.set_answer, response.id, answer)
        return answer

    def wait_for(self, response: StoredResponse) -> None:
        """Store the answer once there is one."""
        self._begin(self._wait(response))

    def _begin(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait(self, response: StoredResponse) -> None:
        while True:
            try:
                answer = await _answer_of(self._backend, response)
                is_early = answer["status"] == "failed" and time.time() < response.created_at + _ENQUEUED_S
                if is_early and not await self._is_enqueued(response):
                    await asyncio.sleep(_AGAIN_S)
                    continue
            except RedisUnavailable:
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                await asyncio.to_thread(self.store.set_answer, response.id, answer)
            except FileNotFoundError:
                pass  # it was deleted
            except OSError as error:
                log.error("the answer of %s cannot be stored, and is tried again: %s", response.id, error)
                await asyncio.sleep(_AGAIN_S)
                continue
            return

    async def _is_enqueued(self, response: StoredResponse) -> bool:
        """Another process enqueues its job after it has stored the response."""
        try:
            await self._backend.ticket(response.job_id).status()
        except JobNotFound:
            return False
        return True

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.store.sweep)
            except OSError as error:
                log.error("old responses cannot be removed: %s", error)
            await asyncio.sleep(_SWEEP_S)


async def _answer_of(backend: Backend, response: StoredResponse, timeout_s: float | None = None) -> dict[str, Any]:
    """The response after its job's end. Raises `ResultTimeout`: the job has not ended in time; `RedisUnavailable`."""
    try:
        result = await backend.ticket(response.job_id).result(timeout_s)
    except (ResultTimeout, RedisUnavailable):
        raise
    except JobCanceled:
        return _frame_of(response, "cancelled")
    except StokerError as error:
        return failed_response(_frame_of(response, "failed"), of_exception(error))
    return ended_response(result, response.created_at, response.kept)


def _frame_of(response: StoredResponse, status: str) -> dict[str, Any]:
    return frame(response.id, response.created_at, response.kept, status)


async def retrieve(request: Request) -> Response:
    """Raises `Failure`: no such response, or it is to be streamed."""
    if request.query_params.get("stream", "false") != "false":
        raise Failure(
            400, "'stream' is not served here: retrieve it without", code="unsupported_parameter", param="stream"
        )
    return Json(await _background(request).now(await _response(request)))


async def list_input(request: Request) -> Response:
    response = await _response(request)
    items = input_items(response.input)
    if request.query_params.get("order") == "asc":
        items.reverse()
    return Json(page_of(items, request.query_params, most=100))


async def cancel(request: Request) -> Response:
    """Raises `Failure`: its client waits for it; such a response is canceled by hanging up."""
    response = await _response(request)
    if not response.is_background:
        raise Failure(400, "only responses in the background can be canceled", code="invalid_value")
    background = _background(request)
    if await asyncio.to_thread(background.store.answer, response.id) is None:
        backend: Backend = request.app.state.backend
        with suppress(JobNotFound):
            await backend.ticket(response.job_id).cancel()
            background.wait_for(response)  # the process that made it may be gone
    return Json(await background.now(response))


async def delete(request: Request) -> Response:
    """A background job continues; nobody gets its answer."""
    response = await _response(request)
    await asyncio.to_thread(_background(request).store.remove, response.id)
    return Json({"id": response.id, "object": "response", "deleted": True})


def _background(request: Request) -> Background:
    background: Background = request.app.state.background
    return background


async def _response(request: Request) -> StoredResponse:
    store = _background(request).store
    return await asyncio.to_thread(store.get, request.state.owner, request.path_params["response_id"])
