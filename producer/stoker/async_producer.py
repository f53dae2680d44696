"""The producer for asyncio, as `Producer` but on redis.asyncio. Thin: both share the operations, which do the work."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, Unpack, overload

from redis.asyncio import Redis

from stoker.agent_jobs import AsyncAgents
from stoker.async_driver import run
from stoker.async_ticket import AsyncTicket
from stoker.connection import address, blocking_slice_s, open_async_connection
from stoker.job_options import checked_queue_name
from stoker.operations import ask
from stoker.outstanding import Outcomes, Outstanding
from stoker.overview import Overview, overview
from stoker.presence import Attendance, LiveWorker, live_workers, unattended
from stoker.queue_status import QueueStatus, queues_now
from stoker.routing import Routing
from stoker.shared_connection import SharedConnection
from stoker.submitting import ManyFields, SubmitFields, submit, submit_many
from stoker.ticket_status import TicketStatus
from stoker_shared.errors import JobError, ResultTimeout
from stoker_shared.request import GenerationRequest
from stoker_shared.result import GenerationResult
from stoker_shared.wire import DEFAULT_QUEUE


class AsyncProducer:
    """Enqueues generation jobs from the tasks of one event loop; share one per loop. Never use it across a fork.

    For any number of tasks, it opens at most some twenty connections; all tasks that wait for results share one of
    them. It can be pickled if it was made from a URL; the pickle then contains the URL with its password.

    Nothing is sent before the first call. Every method raises the errors of the same method of `Producer`.

    Attributes:
        agents: agents' memory: `info`, `forget`, `fork`, `rollback`.
    """

    def __init__(self, redis: str | Redis, *, queue: str = DEFAULT_QUEUE, seed: int | None = None) -> None:
        """
        Args:
            redis: a URL, or a connection of redis.asyncio, which is used as it is and never closed.
            queue: RQ queue of jobs that name none.
            seed: as for `Producer`.

        Raises:
            InvalidRequest, ValueError: as `Producer`.
        """
        self._queue = checked_queue_name(queue)
        self._connection = open_async_connection(redis)
        self._shared = SharedConnection(self._connection)
        self._url = redis if isinstance(redis, str) else None
        self._attendance = Attendance()
        self._routing = Routing(self._queue, seed)
        self.agents = AsyncAgents(self._shared.connection, self._queue)

    def __repr__(self) -> str:
        return f"AsyncProducer(redis at {address(self._connection)}, queue={self._queue!r})"

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        if self._url is None:
            raise TypeError("an AsyncProducer made from a connection cannot be pickled; make it from a URL")
        return partial(type(self), self._url, queue=self._queue), ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all waits for results, and close the connection if it was made from a URL."""
        await self._shared.aclose()
        if self._url is not None:
            await self._connection.aclose()

    async def ping(self) -> None:
        """As `Producer.ping`."""
        await self._shared.run(ask("PING"))

    async def submit(
        self, *, queue: str | None = None, job_id: str | None = None, **fields: Unpack[SubmitFields]
    ) -> AsyncTicket:
        """As `Producer.submit`."""
        done = await self._shared.run(submit(self._queue_for(queue), self._routing, fields, job_id))
        await self._shared.run(self._attendance.check(done.queue))
        return AsyncTicket(self._shared, done.job_id, queue_if_new=done.queue_if_new)

    async def submit_many(
        self,
        requests: Iterable[GenerationRequest | Mapping[str, Any]],
        *,
        queue: str | None = None,
        job_ids: Sequence[str] | None = None,
        **options: Unpack[ManyFields],
    ) -> list[AsyncTicket]:
        """As `Producer.submit_many`; other tasks run meanwhile."""
        name = self._queue_for(queue)
        done = await self._shared.run(submit_many(name, requests, self._routing, options, job_ids))
        for name in {one.queue for one in done}:
            await self._shared.run(self._attendance.check(name))
        return [AsyncTicket(self._shared, one.job_id, queue_if_new=one.queue_if_new) for one in done]

    async def queues(self) -> list[QueueStatus]:
        """As `Producer.queues`."""
        return await self._shared.run(queues_now())

    async def workers(self) -> list[LiveWorker]:
        """As `Producer.workers`."""
        return await self._shared.run(live_workers())

    async def overview(self) -> Overview:
        """As `Producer.overview`."""
        return await self._shared.run(overview())

    async def unattended(self, queue: str | None = None) -> str | None:
        """As `Producer.unattended`."""
        return await self._shared.run(unattended(self._queue_for(queue)))

    def ticket(self, job_id: str) -> AsyncTicket:
        """As `Producer.ticket`."""
        return AsyncTicket(self._shared, job_id)

    async def as_completed(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None
    ) -> AsyncIterator[AsyncTicket]:
        """As `Producer.as_completed`: ``async for ticket in producer.as_completed(tickets)``."""
        outstanding = Outstanding(tickets, timeout_s, blocking_slice_s(self._connection))
        for ticket in outstanding.ended_before:
            yield ticket
        while outstanding:
            for ticket in await run(self._connection, outstanding.next()):
                yield ticket
            await asyncio.sleep(0)

    @overload
    async def results(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None, *, return_errors: Literal[False] = False
    ) -> list[GenerationResult]: ...

    @overload
    async def results(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None, *, return_errors: bool
    ) -> list[GenerationResult | JobError]: ...

    async def results(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None, *, return_errors: bool = False
    ) -> list[GenerationResult] | list[GenerationResult | JobError]:
        """As `Producer.results`."""
        wanted = list(tickets)
        outcomes = Outcomes(return_errors)
        try:
            async for ticket in self.as_completed(wanted, timeout_s):
                outcomes.add(ticket)
        except ResultTimeout:
            if not return_errors:
                raise
        return outcomes.of(wanted)

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
