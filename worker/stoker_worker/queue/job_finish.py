"""Ends jobs with RQ's own transactions, once, and only while they are ours. Finisher threads (fetcher: refused jobs).

Owns the guarantee that an end is written once and that all its follow-ups are done, whichever reply got lost. Both of
RQ's transactions begin with a check that the run is ours, and end with a note. A worker that finds the note has written
the end before, and goes on with the follow-ups. RQ calls `OwnedQueue.move_dependents_to_ready` in the transaction of a
success, and `JsonJob.before_end` in that of a failure; both check. It calls `RqRegistration.cleanup_execution` last,
and that calls `JsonJob.at_end`, which writes the note.
"""

import logging
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now

from stoker_shared.errors import OwnershipLost, RedisUnavailable, RequestError, StokerError
from stoker_shared.text import message_line
from stoker_shared.wire import DEFAULT_RESULT_TTL_S, ENDED_KEY, META_PARTIAL
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.json_job import JobRun, JsonJob
from stoker_worker.queue.last_resort import LastResort, is_the_jobs
from stoker_worker.queue.ownership import End, EndedNote, Ownership
from stoker_worker.queue.progress_meta import read_meta, without_progress
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.transient_errors import may_pass

log = logging.getLogger(__name__)

_CHECKS: Final = 30
_TRIES: Final = 3  # a heartbeat may have been on its way to the execution when the end was written


class AlreadyWritten(Exception):
    """This worker has written the end before, and the reply was lost."""

    def __init__(self, note: EndedNote) -> None:
        self.note = note


class OwnedQueue(Queue):
    """A queue whose part in RQ's success transaction begins with a check of the ownership.

    RQ calls `move_dependents_to_ready` inside its WATCH loop, before the transaction and again for each new try.
    """

    ending: "Ending"
    retries_in_place = False

    def _enqueue_job(
        self, job: Job, pipeline: Pipeline | None = None, at_front: bool = False, unique: bool = False
    ) -> Job:
        """In front: RQ puts a job that is retried at once behind all others, and so behind its agent's next job."""
        return super()._enqueue_job(job, pipeline, at_front or self.retries_in_place, unique)

    def move_dependents_to_ready(
        self, job: Job, pipeline: Pipeline | None = None, *args: Any, **options: Any
    ) -> dict[str, list[str]]:
        assert pipeline is not None  # FollowUp calls it without one, on a queue of RQ's
        self.ending.check(pipeline)
        by_queue = super().move_dependents_to_ready(job, pipeline, *args, **options)
        self.ending.note.dependents = [job_id for ids in by_queue.values() for job_id in ids]
        return by_queue

    def enqueue_ready_jobs_by_queue(self, job_ids_by_queue_name: dict[str, list[str]]) -> None:
        """Nothing: FollowUp does it, and can tell when it was not done."""


class Ending:
    """One try to end a job: its note, and the check that begins the transaction."""

    def __init__(self, ownership: Ownership, run: JobRun, end: End, *, partial_text: str | None = None) -> None:
        self._ownership = ownership
        self._run = run
        self._partial_text = partial_text
        self._changes_meta = False
        self._n_checks = 0
        self.note = EndedNote(end, rate_limit=run.job.rate_limit_key or "", member=ownership.member)

    def written(self) -> EndedNote | None:
        """The note, if this end was written already.

        Raises:
            OwnershipLost: the run is not ours (any more), or has ended in another way.
        """
        state = self._ownership.of(self._run)
        if state == "ours":
            return None
        if state == "lost" or state.end != self.note.end:
            raise OwnershipLost(f"job {self._run.job.id} is no longer this worker's, or has ended already")
        return state

    def check(self, pipeline: Pipeline) -> None:
        """Watch the keys that make the run ours, then look: a change from here on undoes the transaction.

        Raises:
            RuntimeError: the job is written all the time; after another error, RQ would try again for ever.
        """
        self._n_checks += 1
        if self._n_checks > _CHECKS:
            raise RuntimeError(f"job {self._run.job.id} is written all the time")
        self._ownership.watch(pipeline, self._run)
        if (note := self.written()) is not None:
            raise AlreadyWritten(note)
        if self._run.job.has_progress or self._partial_text is not None:
            self._read_meta(pipeline)

    def open(self, pipeline: Pipeline) -> None:
        """Begin a transaction that is not a success: RQ watches no keys in that of a failure."""
        self.check(pipeline)
        self.note.dependents = self._run.job.dependent_ids
        pipeline.multi()
        self._write_meta(pipeline)

    def _read_meta(self, pipeline: Pipeline) -> None:
        """As it is now: its producer may have changed it. A change from here on undoes the transaction."""
        rq_job = self._run.job
        if (fields := read_meta(pipeline.hget(rq_job.key, "meta"))) is not None:
            rq_job.meta = without_progress(fields)  # RQ writes it again when it retries the job
            if self._partial_text is not None:
                rq_job.meta[META_PARTIAL] = self._partial_text
            self._changes_meta = True

    def _write_meta(self, pipeline: Pipeline) -> None:
        rq_job = self._run.job
        if self._changes_meta and rq_job.meta:
            pipeline.hset(rq_job.key, "meta", rq_job._serialize_meta())
        elif self._changes_meta:
            pipeline.hdel(rq_job.key, "meta")

    def finish_with_note(self, pipeline: Pipeline) -> None:
        if self._run.job.get_result_ttl(DEFAULT_RESULT_TTL_S) != 0:  # else the job is deleted at its end
            self._write_meta(pipeline)
        self.write_note(pipeline)

    def write_note(self, pipeline: Pipeline) -> None:
        key = ENDED_KEY.format(queue=self._run.job.origin)
        pipeline.hset(key, self._run.execution.composite_key, self.note.to_json())


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

    def finish(self, run: JobRun, result: Mapping[str, Any], also: Callable[[Pipeline], None] | None = None) -> None:
        """
        Args:
            also: adds to the transaction.

        Raises:
            OwnershipLost: the run is not ours (any more), or it is finished already.
        """
        ending = Ending(self._ownership, run, "finished")
        try:
            self._write_success(run, ending, result, also)
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
        ending = Ending(self._ownership, run, "failed", partial_text=partial_text)
        if isinstance(error, RequestError) or not may_retry:
            rq_job.retries_left = 0  # the same request fails the same way
        self._end_badly(run, ending, f"{type(error).__name__}: {message_line(error)}")

    def stop(self, run: JobRun) -> bool:
        """End a job that was stopped on request, canceled or deleted; ``True`` if it was stopped."""
        if self._ownership.of(run) == "lost":
            self._ownership.let_go(run)
            return False
        self._end_badly(run, Ending(self._ownership, run, "stopped"), "JobStopped: stopped on request")
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

    def _write_success(
        self, run: JobRun, ending: Ending, result: Mapping[str, Any], also: Callable[[Pipeline], None] | None
    ) -> None:
        rq_job = run.job
        rq_job.ended_at = rq_job.last_heartbeat = now()  # written with the rest
        rq_job._result = dict(result)
        rq_job.serializer = PackedJson if rq_job.packs_result else JSONSerializer
        rq_job._status = JobStatus.FINISHED

        def at_end(pipeline: Pipeline) -> None:
            if run.writes is not None:
                self._placement.wrote(pipeline, run.writes, result)
            ending.finish_with_note(pipeline)
            if also is not None:
                also(pipeline)

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
