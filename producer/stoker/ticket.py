"""A ticket: one enqueued job, to be waited for, asked about or canceled. Owns nothing but the id and a connection."""

from redis import Redis

from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.driver import run
from stoker.job_record import require_readable_id
from stoker.ticket_status import TicketStatus, status_of
from stoker.waiting import wait_for_end
from stoker_shared.result import GenerationResult


class Ticket:
    """One job by its id, whoever enqueued it. Cheap to make; safe to use from any thread.

    Every method raises `RedisUnavailable` when no server answers or it refuses us.
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
        return f"Ticket({self._job_id!r})"

    def result(self, timeout_s: float | None = None) -> GenerationResult:
        """Wait for the job's end and return what it generated.

        A connection that is lost while waiting is waited for too, until `timeout_s` (a minute when that is ``None``).

        Args:
            timeout_s: how long to wait; ``None`` for as long as it takes, 0 to look once. The job goes on regardless.

        Raises:
            JobFailed: with the worker's reason, and the text so far if it timed out.
            JobCanceled: it was canceled, or stopped while it ran.
            JobNotFound: no such job, or its result has expired.
            ResultTimeout: it has not ended within `timeout_s`.
            RedisUnavailable: no server answers.
        """
        slice_s = blocking_slice_s(self._connection)
        record = run(self._connection, wait_for_end(self._job_id, timeout_s, slice_s))
        return record.outcome()

    def status(self) -> TicketStatus:
        """Where the job stands now.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        return run(self._connection, status_of(self._job_id))

    def cancel(self) -> bool:
        """Cancel the job if it waits, ask its worker to stop it if it runs.

        Returns:
            ``True`` when it was canceled or the worker was asked (which takes a moment: `result` then raises
            `JobCanceled`, unless the job ends first), ``False`` when it had already ended.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        return run(self._connection, cancel_job(self._job_id))
