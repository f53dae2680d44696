"""A ticket for asyncio: as `Ticket`, on redis.asyncio. Owns nothing but the id and a connection."""

from collections.abc import AsyncIterator

from stoker.any_ticket import AnyTicket
from stoker.async_driver import run
from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.shared_connection import SharedConnection
from stoker.streaming import StreamEvent, StreamReader
from stoker.ticket_status import TicketStatus, status_of
from stoker_shared.result import GenerationResult


class AsyncTicket(AnyTicket):
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
        super().__init__(job_id, queue_if_new)
        self._shared = shared

    async def result(self, timeout_s: float | None = None) -> GenerationResult:
        """As `Ticket.result`, but thousands of tasks may wait at a time: they share one connection and one wait.

        A server that is away for a minute ends it, also when `timeout_s` is longer.
        """
        ended = self._ended or await self._shared.end_of(self._job_id, timeout_s, self._queue_if_new)
        return ended.outcome()

    async def stream(self, timeout_s: float | None = None) -> AsyncIterator[StreamEvent]:
        """As `Ticket.stream`."""
        connection = self._shared.connection
        reader = StreamReader(self._job_id, timeout_s, blocking_slice_s(connection))
        while not reader.is_over:
            for event in await run(connection, reader.read()):
                yield event

    async def status(self) -> TicketStatus:
        """As `Ticket.status`."""
        return await self._shared.run(status_of(self._job_id))

    async def cancel(self) -> bool:
        """As `Ticket.cancel`."""
        return await self._shared.run(cancel_job(self._job_id))
