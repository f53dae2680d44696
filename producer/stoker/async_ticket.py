"""A ticket for asyncio, as `Ticket` but on redis.asyncio. Owns the id; shares its producer's connection."""

from collections.abc import AsyncGenerator

from stoker.any_ticket import AnyTicket
from stoker.async_driver import run
from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.shared_connection import SharedConnection
from stoker.streaming import StreamEvent, StreamReader
from stoker.ticket_status import TicketStatus, status_of
from stoker.trust_counts import give_feedback
from stoker_shared.result import GenerationResult


class AsyncTicket(AnyTicket):
    """One job by its id, from any producer. For the tasks of one event loop.

    It cannot be pickled: send its `job_id`. Every method raises the errors of the same method of `Ticket`.
    """

    def __init__(self, shared: SharedConnection, job_id: str, *, queue_if_new: str | None = None) -> None:
        """
        Args:
            queue_if_new: the queue into which the job was enqueued just now, under a generated id.

        Raises:
            ValueError: `job_id` is empty or has characters that no job id has.
        """
        super().__init__(job_id, queue_if_new)
        self._shared = shared

    async def result(self, timeout_s: float | None = None) -> GenerationResult:
        """As `Ticket.result`, but thousands of tasks can wait at the same time: they share one connection and one wait.

        The wait ends with `RedisUnavailable` when the server has been away for a minute, even if `timeout_s` is longer.
        """
        ended = self._ended or await self._shared.end_of(self._job_id, timeout_s, self._queue_if_new)
        return ended.outcome()

    async def stream(self, timeout_s: float | None = None) -> AsyncGenerator[StreamEvent]:
        """As `Ticket.stream`."""
        connection = self._shared.connection
        reader = StreamReader(self._job_id, timeout_s, blocking_slice_s(connection))
        while not reader.is_over:
            for event in await run(connection, reader.read()):
                yield event

    async def status(self) -> TicketStatus:
        """As `Ticket.status`."""
        return await self._shared.run(status_of(self._job_id))

    async def feedback(self, *, accepted: bool) -> bool:
        """As `Ticket.feedback`."""
        result = await self.result(timeout_s=0)
        return await self._shared.run(give_feedback(result, accepted=accepted))

    async def cancel(self) -> bool:
        """As `Ticket.cancel`."""
        return await self._shared.run(cancel_job(self._job_id))
