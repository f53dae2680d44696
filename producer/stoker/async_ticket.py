"""A ticket for asyncio: as `Ticket`, on redis.asyncio. Owns nothing but the id and a connection."""

from collections.abc import AsyncIterator
from typing import NoReturn

from stoker.async_driver import run
from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.job_record import require_readable_id
from stoker.shared_connection import SharedConnection
from stoker.streaming import StreamEvent, StreamReader
from stoker.ticket_status import TicketStatus, status_of
from stoker.waiter import Ended
from stoker_shared.result import GenerationResult


class AsyncTicket:
    """One job by its id, whoever enqueued it. For tasks of one event loop.

    It cannot be pickled: send its `job_id`. Every method raises what the same one of `Ticket` raises.
    """

    def __init__(self, shared: SharedConnection, job_id: str, *, queue_if_new: str | None = None) -> None:
        """
        Args:
            queue_if_new: where the job was enqueued just now, under an id that was made up for it.

        Raises:
            ValueError: `job_id` is empty or holds characters no job id has.
        """
        self._connection = shared.connection
        self._shared = shared
        self._job_id = require_readable_id(job_id)
        self._queue_if_new = queue_if_new
        self._ended: Ended | None = None

    @property
    def job_id(self) -> str:
        return self._job_id

    def __repr__(self) -> str:
        return f"AsyncTicket({self._job_id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncTicket holds a connection and cannot be pickled; send its job_id instead")

    async def result(self, timeout_s: float | None = None) -> GenerationResult:
        """As `Ticket.result`, but thousands of tasks may wait at a time: they share one connection and one wait.

        A server that is away for a minute ends it, also when `timeout_s` is longer.
        """
        ended = self._ended or await self._shared.end_of(self._job_id, timeout_s, self._queue_if_new)
        return ended.outcome()

    async def stream(self, timeout_s: float | None = None) -> AsyncIterator[StreamEvent]:
        """As `Ticket.stream`."""
        reader = StreamReader(self._job_id, timeout_s, blocking_slice_s(self._shared.connection))
        while not reader.is_over:
            for event in await run(self._shared.connection, reader.read()):
                yield event

    async def status(self) -> TicketStatus:
        """As `Ticket.status`."""
        return await self._shared.run(status_of(self._job_id))

    async def cancel(self) -> bool:
        """As `Ticket.cancel`."""
        return await self._shared.run(cancel_job(self._job_id))
