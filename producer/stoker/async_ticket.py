"""A ticket for asyncio: as `Ticket`, on redis.asyncio. Owns nothing but the id and a connection."""

from redis.asyncio import Redis

from stoker.async_driver import run
from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.job_record import require_readable_id
from stoker.ticket_status import TicketStatus, status_of
from stoker.waiting import wait_for_end
from stoker_shared.result import GenerationResult


class AsyncTicket:
    """One job by its id, whoever enqueued it. For tasks of one event loop.

    Every method raises what the same one of `Ticket` raises.
    """

    def __init__(self, connection: Redis, job_id: str) -> None:
        """
        Raises:
            ValueError: `job_id` is empty or holds characters no job id has.
        """
        self._connection = connection
        self._job_id = require_readable_id(job_id)

    @property
    def job_id(self) -> str:
        return self._job_id

    def __repr__(self) -> str:
        return f"AsyncTicket({self._job_id!r})"

    async def result(self, timeout_s: float | None = None) -> GenerationResult:
        """As `Ticket.result`."""
        slice_s = blocking_slice_s(self._connection)
        record = await run(self._connection, wait_for_end(self._job_id, timeout_s, slice_s))
        return record.outcome()

    async def status(self) -> TicketStatus:
        """As `Ticket.status`."""
        return await run(self._connection, status_of(self._job_id))

    async def cancel(self) -> bool:
        """As `Ticket.cancel`."""
        return await run(self._connection, cancel_job(self._job_id))
