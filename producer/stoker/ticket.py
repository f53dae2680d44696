"""A ticket: waits for one job, reads its status or cancels it. Owns the id; shares its producer's connection."""

from collections.abc import Iterator

from redis import Redis

from stoker.any_ticket import AnyTicket
from stoker.canceling import cancel_job
from stoker.connection import blocking_slice_s
from stoker.driver import run
from stoker.streaming import StreamEvent, StreamReader
from stoker.ticket_status import TicketStatus, status_of
from stoker.trust_counts import give_feedback
from stoker.waiting import wait_for_end
from stoker_shared.result import GenerationResult


class Ticket(AnyTicket):
    """One job by its id, from any producer. Cheap to make; safe to use from any thread, and in a forked child.

    It cannot be pickled: send its `job_id`, and call `Producer.ticket` there. Every method raises `RedisUnavailable`
    when no server answers or it refuses us.
    """

    def __init__(self, connection: Redis, job_id: str, *, queue_if_new: str | None = None) -> None:
        """
        Args:
            queue_if_new: the queue into which the job was enqueued just now, under a generated id.

        Raises:
            ValueError: `job_id` is empty or has characters that no job id has.
        """
        super().__init__(job_id, queue_if_new)
        self._connection = connection

    def result(self, timeout_s: float | None = None) -> GenerationResult:
        """Wait for the job's end and return its result.

        The wait endures a lost connection until `timeout_s` (for a minute if that is ``None``). For many jobs,
        `Producer.results` and `Producer.as_completed` send far fewer commands; a ticket that they have returned has its
        job's end already.

        Args:
            timeout_s: how long to wait, in seconds; ``None`` for no limit, 0 to check once. The job continues
            regardless.

        Raises:
            JobFailed: the worker failed it; the error has the reason, and the text so far if the job timed out.
            JobCanceled: it was canceled, or stopped by RQ's command.
            JobNotFound: no such job, or its result has expired.
            ResultTimeout: it has not ended within `timeout_s`.
            RedisUnavailable: no server answers.
        """
        if self._ended is not None:
            return self._ended.outcome()
        slice_s = blocking_slice_s(self._connection)
        return run(self._connection, wait_for_end(self._job_id, timeout_s, slice_s)).outcome()

    def stream(self, timeout_s: float | None = None) -> Iterator[StreamEvent]:
        """The text as it is generated: first the text so far, then each new piece until the job has ended.

        The chunks since the last `Restarted` are together exactly `result().text`. A lost connection is endured, as by
        `result`.

        Args:
            timeout_s: how long to read in all, in seconds; ``None`` until the job ends.

        Raises:
            JobFailed, JobCanceled, JobNotFound, ResultTimeout, RedisUnavailable: as `result`, after the last event.
        """
        reader = StreamReader(self._job_id, timeout_s, blocking_slice_s(self._connection))
        while not reader.is_over:
            yield from run(self._connection, reader.read())

    def status(self) -> TicketStatus:
        """The job's state, and its place in the queue or its progress.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        return run(self._connection, status_of(self._job_id))

    def feedback(self, *, accepted: bool) -> bool:
        """Count a verdict on the answer, of a person or a program; once for a job. It takes the place of the verdict of
        the job's check, and decides with the others how far the model is trusted with such tasks.

        Returns:
            ``False`` if the opposite verdict was given before; that one stays.

        Raises:
            InvalidRequest: the job had neither a check nor `models`.
            JobFailed, JobCanceled, JobNotFound, ResultTimeout, RedisUnavailable: as `result`, without a wait.
        """
        return run(self._connection, give_feedback(self.result(timeout_s=0), accepted=accepted))

    def cancel(self) -> bool:
        """Cancel the job, whatever it is doing: waiting, running, failing, being retried or repeated.

        Returns:
            ``True`` if it was canceled: `result` raises `JobCanceled` from now on, and the job never runs again (its
            worker needs a moment to notice). ``False`` if it had ended, or its agent's turn is being saved, so that it
            goes on to its result.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        return run(self._connection, cancel_job(self._job_id))
