"""The producer for asyncio: as `Producer`, on redis.asyncio. Thin: the work is in operations, which both share."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from redis.asyncio import Redis

from stoker.async_driver import run
from stoker.async_ticket import AsyncTicket
from stoker.connection import address, open_async_connection
from stoker.job_options import JobOptions
from stoker.operations import ask
from stoker.queue_name import checked_queue_name
from stoker.submitting import ManyFields, SubmitFields, submit, submit_many
from stoker.ticket_status import TicketStatus
from stoker_shared.request import GenerationRequest
from stoker_shared.result import GenerationResult
from stoker_shared.wire import DEFAULT_QUEUE


class AsyncProducer:
    """Enqueues generation jobs from the tasks of one event loop; share one per loop.

    Nothing is sent before the first call. Every method raises what the same one of `Producer` raises.
    """

    def __init__(self, redis: str | Redis, *, queue: str = DEFAULT_QUEUE) -> None:
        """
        Args:
            redis: a URL, or a connection of redis.asyncio, used as it is and never closed.
            queue: RQ queue for jobs that name none.

        Raises:
            InvalidRequest, ValueError: as `Producer`.
        """
        self._queue = checked_queue_name(queue)
        self._connection = open_async_connection(redis)
        self._owns_connection = isinstance(redis, str)

    def __repr__(self) -> str:
        return f"AsyncProducer(redis at {address(self._connection)}, queue={self._queue!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection if it was opened here from a URL; its tickets open it again when used."""
        if self._owns_connection:
            await self._connection.aclose()

    async def ping(self) -> None:
        """As `Producer.ping`."""
        await run(self._connection, ask("PING"))

    async def submit(
        self, *, queue: str | None = None, job_id: str | None = None, **fields: Unpack[SubmitFields]
    ) -> AsyncTicket:
        """As `Producer.submit`."""
        return self.ticket(await run(self._connection, submit(self._queue_for(queue), fields, job_id)))

    async def submit_many(
        self,
        requests: Iterable[GenerationRequest | Mapping[str, Any]],
        *,
        queue: str | None = None,
        job_ids: Sequence[str] | None = None,
        **options: Unpack[ManyFields],
    ) -> list[AsyncTicket]:
        """As `Producer.submit_many`; other tasks go on meanwhile."""
        operation = submit_many(self._queue_for(queue), requests, JobOptions(**options), job_ids)
        return [self.ticket(job_id) for job_id in await run(self._connection, operation)]

    def ticket(self, job_id: str) -> AsyncTicket:
        """As `Producer.ticket`."""
        return AsyncTicket(self._connection, job_id)

    async def result(self, job_id: str, timeout_s: float | None = None) -> GenerationResult:
        """`AsyncTicket.result` by id."""
        return await self.ticket(job_id).result(timeout_s)

    async def status(self, job_id: str) -> TicketStatus:
        """`AsyncTicket.status` by id."""
        return await self.ticket(job_id).status()

    async def cancel(self, job_id: str) -> bool:
        """`AsyncTicket.cancel` by id."""
        return await self.ticket(job_id).cancel()

    def _queue_for(self, name: str | None) -> str:
        return self._queue if name is None else checked_queue_name(name)
