"""A ticket: one enqueued job, to be waited for, asked about or canceled. Owns nothing but the id and a connection."""

from collections.abc import Iterator

from redis import Redis

from stoker.any_ticket import AnyTicket
from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.driver import run
from stoker.streaming import StreamEvent, StreamReader
from stoker.ticket_status import TicketStatus, status_of
from stoker.waiting import wait_for_end
from stoker_shared.result import GenerationResult


class Ticket(AnyTicket):
    """One job by its id, whoever enqueued it. Cheap to make; safe to use from any thread, and in a forked child.

    It cannot be pickled: send its `job_id`, and call `Producer.ticket` there. Every method raises `RedisUnavailable`
    when no server answers or it refuses us.
    """

    def __init__(self, connection: Redis, job_id: str, *, queue_if_new: str | None = None) -> None:
        """
        Args:
            queue_if_new: where the job was enqueued just now, under an id that was made up for it.

        Raises:
            ValueError: `job_id` is empty or holds characters no job id has.
        """
        super().__init__(job_id, queue_if_new)
        self._connection = connection

    def result(self, timeout_s: float | None = None) -> GenerationResult:
        """Wait for the job's end and return what it generated.

        A connection that is lost while waiting is waited for too, until `timeout_s` (a minute when that is ``None``).
        For many jobs, `Producer.results` and `Producer.as_completed` ask the server much less; a ticket that these have
        given back has its job's end, and asks nothing.

        Args:
            timeout_s: how long to wait; ``None`` for as long as it takes, 0 to look once. The job goes on regardless.

        Raises:
            JobFailed: with the worker's reason, and the text so far if it timed out.
            JobCanceled: it was canceled, or stopped while it ran.
            JobNotFound: no such job, or its result has expired.
            ResultTimeout: it has not ended within `timeout_s`.
            RedisUnavailable: no server answers.
        """
        if self._ended is not None:
            return self._ended.outcome()
        slice_s = blocking_slice_s(self._connection)
        return run(self._connection, wait_for_end(self._job_id, timeout_s, slice_s)).outcome()

    def stream(self, timeout_s: float | None = None) -> Iterator[StreamEvent]:
        """The text as it is generated: what there is already, then more until the job has ended.

        The chunks since the last `Restarted` are together exactly `result().text`. A lost connection is waited for, as
        in `result`.

        Args:
            timeout_s: how long to read in all; ``None`` until the job ends.

        Raises:
            JobFailed, JobCanceled, JobNotFound, ResultTimeout, RedisUnavailable: as `result`, where the text ends.
        """
        reader = StreamReader(self._job_id, timeout_s, blocking_slice_s(self._connection))
        while not reader.is_over:
            yield from run(self._connection, reader.read())

    def status(self) -> TicketStatus:
        """Where the job is now.

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
