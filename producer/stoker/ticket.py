"""A ticket: one enqueued job, to be waited for, asked about or canceled. Owns nothing but the id and a connection."""

from redis import Redis
from rq.queue import Queue

from stoker.canceling import cancel_job
from stoker.connection import redis_errors
from stoker.job_record import JobRecord
from stoker.ticket_status import TicketStatus
from stoker.waiting import wait_for_end
from stoker_shared.errors import JobCanceled, JobFailed, JobNotFound
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
        if not job_id or not job_id.isprintable():
            raise ValueError("a job id is a non-empty printable string")
        self._connection = connection
        self._job_id = job_id

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
        with redis_errors(self._connection):
            record = wait_for_end(self._connection, self._job_id, timeout_s)
        if record.state == "failed":
            raise JobFailed(self._job_id, record.reason(), record.partial_text)
        if record.state != "finished":
            raise JobCanceled(self._job_id, "stopped while it ran" if record.state == "stopped" else "canceled")
        result = record.result()
        if result is None:
            raise JobNotFound(self._job_id, "finished, but its result has expired")
        return result

    def status(self) -> TicketStatus:
        """Where the job stands now.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        with redis_errors(self._connection):
            record = JobRecord.read(self._connection, self._job_id)
            if record is None:
                raise JobNotFound(self._job_id, "not found (it never was, was deleted, or has expired)")
            if record.state == "queued":
                # ``None`` in the moment between a worker's claim and its start.
                position = self._connection.lpos(Queue(record.queue, connection=self._connection).key, self._job_id)
                return TicketStatus("queued", position=position if isinstance(position, int) else None)
        if record.state == "started":
            return TicketStatus("started", tokens=record.tokens, worker=record.worker)
        return TicketStatus(record.state)

    def cancel(self) -> bool:
        """Cancel the job if it waits, ask its worker to stop it if it runs.

        Returns:
            ``True`` when it was canceled or the worker was asked (which takes a moment: `result` then raises
            `JobCanceled`, unless the job ends first), ``False`` when it had already ended.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        with redis_errors(self._connection):
            return cancel_job(self._connection, self._job_id)
