"""Ends jobs with RQ's own transactions, once, and only while they are ours. Finisher threads (fetcher: refused jobs).

Owns the guarantee that an end is written once and that all its follow-ups are done, whichever reply got lost. Both of
RQ's transactions begin with a check that the run is ours, and end with a note (`ending.py`). A worker that finds the
note has written the end before, and goes on with the follow-ups.
"""

import logging
import threading
import zlib
from collections.abc import Mapping
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from stoker_shared.error_line import message_line
from stoker_shared.errors import RedisUnavailable, RequestError, StokerError
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.ending import AlreadyWritten, Ending, OwnedQueue
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.json_job import JobRun, JsonJob
from stoker_worker.queue.last_resort import LastResort, is_the_jobs
from stoker_worker.queue.ownership import EndedNote, Ownership
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.transient_errors import may_pass
from stoker_worker.queue.verdicts import Verdicts

log = logging.getLogger(__name__)

_TRIES: Final = 3  # a heartbeat may have been on its way to the execution when the end was written


class _SwallowedErrors(logging.Filter):
    """RQ swallows the error of a failure's transaction, and logs it with a traceback. Keeps the last one of each
    thread, and out of the log: it is tried again, and reported if that does not help."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None or record.exc_info[1] is None:
            return True
        self._of_thread.error = record.exc_info[1]
        return False

    def take(self) -> BaseException | None:
        error, self._of_thread.error = getattr(self._of_thread, "error", None), None
        return error


_swallowed: Final = _SwallowedErrors()


class PackedJson(JSONSerializer):
    """For large numbers of results that wait for long: RQ stores them as base64, which adds a third."""

    @staticmethod
    def dumps(*args: Any, **options: Any) -> bytes:
        return zlib.compress(JSONSerializer.dumps(*args, **options))


class JobFinish:
    """Writes the ends of this worker's jobs."""

    def __init__(
        self,
        connection: Redis,
        registration: RqRegistration,
        ownership: Ownership,
        placement: Placement,
        follow_up: FollowUp,
    ) -> None:
        self._connection = connection
        self._registration = registration
        registration.log.addFilter(_swallowed)
        self.last_resort = LastResort(connection, ownership.lease)
        self._ownership = ownership
        self._placement = placement
        self._follow_up = follow_up
        self._verdicts = Verdicts(connection)

    def finish(self, run: JobRun, result: Mapping[str, Any]) -> None:
        """
        Raises:
            OwnershipLost: the run is not ours (any more), or it is finished already.
        """
        ending = Ending(self._ownership, self._placement, run, "finished", result=result)
        try:
            self._write_success(run, ending, result)
        except AlreadyWritten as written:
            ending.note = written.note
        except Exception as error:
            # After its transaction RQ passes on a place under a rate limit, and that may fail.
            note = None if may_pass(error) else ending.written()
            if note is None:
                raise
            ending.note = note
        self._do_what_follows(run, ending.note)

    def fail(self, run: JobRun, error: Exception, *, partial_text: str | None = None, may_retry: bool = True) -> None:
        """
        Raises:
            OwnershipLost: the run is not ours (any more).
            RedisUnavailable: RQ could not write it.
        """
        rq_job = run.job
        ending = Ending(self._ownership, self._placement, run, "failed", partial_text=partial_text)
        if isinstance(error, RequestError) or not may_retry:
            rq_job.retries_left = 0  # the same request fails the same way
        self._end_badly(run, ending, f"{type(error).__name__}: {message_line(error)}")

    def stop(self, run: JobRun) -> bool:
        """End a job that was stopped on request, canceled or deleted; ``True`` if it was stopped."""
        if self._ownership.of(run) == "lost":
            self._ownership.let_go(run)
            return False
        self._end_badly(run, Ending(self._ownership, self._placement, run, "stopped"), "JobStopped: stopped on request")
        return True

    def _end_badly(self, run: JobRun, ending: Ending, reason: str) -> None:
        error: BaseException | None = None
        for _ in range(_TRIES):
            note = ending.written()
            if note is None:
                error = self._write_failure(run, ending, reason)
                note = ending.written()
            if note is not None:
                self._do_what_follows(run, note)
                return
        if error is None or not is_the_jobs(error):
            raise RedisUnavailable(f"the failure of job {run.job.id} could not be written: {error}")
        log.warning("RQ cannot end job %s: %s: %s", run.job.id, type(error).__name__, message_line(error))
        self.last_resort.fail(run.job.origin, run.job.id, reason, run.execution)

    def _do_what_follows(self, run: JobRun, note: EndedNote) -> None:
        self._follow_up.carry_out(run.job.origin, run.execution.composite_key, note)

    def _queue_of(self, ending: Ending, rq_job: JsonJob) -> OwnedQueue:
        queue = OwnedQueue(rq_job.origin, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
        queue.ending = ending
        return queue

    def _write_success(self, run: JobRun, ending: Ending, result: Mapping[str, Any]) -> None:
        rq_job = run.job
        rq_job.ended_at = rq_job.last_heartbeat = now()  # written with the rest
        rq_job._result = dict(result)
        rq_job.serializer = PackedJson if rq_job.packs_result else JSONSerializer
        rq_job._status = JobStatus.FINISHED

        def at_end(pipeline: Pipeline) -> None:
            ending.finish_with_note(pipeline)
            self._verdicts.count_last(pipeline, result)

        rq_job.at_end = at_end
        repeat = rq_job.repeats_left, rq_job.repeat_intervals
        queue = self._queue_of(ending, rq_job)
        try:
            self._registration.handle_job_success(
                job=rq_job, queue=queue, started_job_registry=queue.started_job_registry, execution=run.execution
            )
        except BaseException:  # RQ counts a repeat before it has written it; the next try must not count it twice
            rq_job.repeats_left, rq_job.repeat_intervals = repeat
            raise
        finally:  # a reference back to the job would keep its request until Python looks for cycles
            rq_job.serializer, rq_job.at_end = JSONSerializer, None

    def _write_failure(self, run: JobRun, ending: Ending, reason: str) -> BaseException | None:
        """The error, if any: its transaction was undone, refused, or written without a reply."""
        rq_job = run.job
        rq_job._status = JobStatus.FAILED
        rq_job.ended_at = rq_job.last_heartbeat = now()
        if ending.note.end == "stopped":
            self._registration._stopped_job_id = rq_job.id
        retries_left = rq_job.retries_left
        queue = self._queue_of(ending, rq_job)
        queue.retries_in_place = True
        rq_job.before_end, rq_job.at_end = ending.open, ending.write_note
        _swallowed.take()
        try:
            self._registration.handle_job_failure(
                job=rq_job,
                queue=queue,
                started_job_registry=queue.started_job_registry,
                exc_string=reason,
                execution=run.execution,
            )
            return _swallowed.take()
        except AlreadyWritten:
            return None
        except StokerError:
            raise
        except Exception as error:  # the keys of a job may hold anything, and have any type
            if not is_the_jobs(error):
                raise
            return error
        finally:  # as with repeats
            rq_job.retries_left, self._registration._stopped_job_id = retries_left, None
            rq_job.before_end = rq_job.at_end = None
