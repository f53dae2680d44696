"""The queue behind the server: one connection to Redis, the limit of calls in flight, and the look for workers.

Owns the keys ``stoker:serve:waiting:NAME`` (sorted set: the calls in flight of a token's name, by their latest end, so
that the calls of a killed process expire).
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Final
from uuid import uuid4

from stoker.api.failure import Failure
from stoker.connection import open_async_connection
from stoker.new_job import NewJob
from stoker.operations import Commands, Operation, T, ask
from stoker.presence import LiveWorker, still_loading
from stoker.producer import AsyncProducer
from stoker.serve.intake import CallHead, CallJobs, call_jobs
from stoker.serve.settings import ServeSettings
from stoker.submitting import enqueue
from stoker.tickets import AsyncTicket, SharedConnection

_END_S: Final = 5.0
_LOOK_S: Final = 0.5
_READY_LOOK_S: Final = 2.0
_RETRY_S: Final = 5
_MOST_LIVE: Final = 64
_READ_AT_ONCE: Final = 2
_GRACE_S: Final = 60
"""Seconds beyond the longest call after which a place is free again."""


class Backend:
    """For one event loop.

    Attributes:
        producer: reads the workers.
        live: one place for each text that is read as it is generated; each needs a connection to Redis.
        calls: the tasks that have a job. When they are canceled at a stop, `aclose` lets them end.
    """

    def __init__(self, redis_url: str, settings: ServeSettings) -> None:
        """Raises `ValueError`: not a Redis URL."""
        self.settings = settings
        self.live = asyncio.Semaphore(_MOST_LIVE)
        self.calls: set[asyncio.Task[Any]] = set()
        self._readers = ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="intake")
        self._connection = open_async_connection(redis_url)
        self._shared = SharedConnection(self._connection)
        self._workers: list[LiveWorker] = []
        self._look_at = float("-inf")
        self.producer = AsyncProducer(self._connection, queue=settings.queue)

    async def run(self, operation: Operation[T]) -> T:
        return await self._shared.run(operation)

    async def aclose(self) -> None:
        if self.calls:
            await asyncio.wait(self.calls, timeout=_END_S)
        self._readers.shutdown(cancel_futures=True)
        await self.producer.aclose()
        await self._shared.aclose()
        await self._connection.aclose()

    async def call_jobs(self, body: IO[bytes], head: CallHead) -> CallJobs:
        """As `intake.call_jobs`, for few bodies at a time, because each is held in memory."""

        def read() -> CallJobs:
            body.seek(0)
            return call_jobs(body.read(), head, self.settings)

        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    async def enqueue(self, jobs: Sequence[NewJob], *, ids_are_new: bool) -> list[AsyncTicket]:
        """Raises `DuplicateJob`: an id names another job; `RedisUnavailable`."""
        await self.run(enqueue(list(jobs), ids_are_new=ids_are_new))
        return [AsyncTicket(self._shared, job.job_id, is_new=ids_are_new) for job in jobs]

    def ticket(self, job_id: str) -> AsyncTicket:
        """The ticket of a job that was enqueued before."""
        return AsyncTicket(self._shared, job_id)

    async def require_worker(self, model: str | None) -> None:
        """Wait for a ready worker. `model` is the model that the call asks for, if any. Raises `Failure`: in the time
        that calls wait, no worker listened to the queue or had loaded its model; or the workers have loaded another
        model."""
        if self.settings.queue_without_worker:
            return
        end = time.monotonic() + self.settings.worker_wait_s
        while (problem := await self._problem()) is not None:
            code, why = problem
            if time.monotonic() >= end:
                raise Failure(503, why, code=code, retryable=True, retry_after_s=_RETRY_S)
            await asyncio.sleep(_LOOK_S)
        loaded = {worker.model for worker in await self.workers()}
        if model is not None and loaded and model not in loaded:
            raise wrong_model(model, sorted(name for name in loaded if name is not None))

    async def workers(self) -> list[LiveWorker]:
        """The workers of the queue, as they were a moment ago."""
        if time.monotonic() >= self._look_at:
            found = await self.producer.workers()
            self._workers = [worker for worker in found if self.settings.queue in worker.queues]
            is_ready = any(worker.model is not None for worker in self._workers)
            self._look_at = time.monotonic() + (_READY_LOOK_S if is_ready else _LOOK_S)
        return self._workers

    async def _problem(self) -> tuple[str, str] | None:
        """Why no worker can run a call now, with a code; a worker without a record counts as ready."""
        if warning := await self.producer.unattended():
            return "no_worker", warning
        if message := still_loading(self.settings.queue, await self.workers()):
            return "model_loading", message
        return None

    async def take_place(self, owner: str) -> str:
        """A place among the calls in flight of this name; `leave_place` gives it back. Raises `Failure`: there are
        `max_waiting` calls already."""
        place = uuid4().hex
        if not await self.run(_take(owner, place, self.settings)):
            message = f"{self.settings.max_waiting} calls of {owner!r} are in flight already"
            raise Failure(429, message, code="too_many_waiting", retryable=True, retry_after_s=_RETRY_S)
        return place

    async def leave_place(self, owner: str, place: str) -> None:
        await self.run(ask("ZREM", _key(owner), place))


def wrong_model(name: str, loaded: Sequence[str]) -> Failure:
    """The refusal of a call for another model than the workers have."""
    models = f"; it serves {', '.join(map(repr, loaded))}" if loaded else ""
    message = f"the model {name!r} is not served here{models}"
    return Failure(404, message, code="model_not_found", param="model")


def _take(owner: str, place: str, settings: ServeSettings) -> Operation[bool]:
    """Adds the place first and then counts, so that simultaneous calls never exceed the limit."""
    key, now, lasts_s = _key(owner), time.time(), settings.timeout_s + _GRACE_S
    _, _, n_taken, _ = yield Commands(
        [
            ("ZREMRANGEBYSCORE", key, "-inf", now),
            ("ZADD", key, now + lasts_s, place),
            ("ZCARD", key),
            ("EXPIRE", key, lasts_s),
        ]
    )
    if n_taken <= settings.max_waiting:
        return True
    yield from ask("ZREM", key, place)
    return False


def _key(owner: str) -> str:
    return f"stoker:serve:waiting:{owner}"
