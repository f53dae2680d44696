"""Ends jobs with RQ's own transactions, once, and only while they are ours. Finaliser thread (inbox: refused jobs).

Owns that the end is written once and that all that follows is done, whatever reply got lost. The transaction checks the
ownership itself, and writes a note with the end (ended_note.py). A worker that finds the note when it tries to write an
end has written that end before, and goes on with what follows.
"""

import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now

from stoker_shared.errors import OwnershipLost, RedisUnavailable, RequestError
from stoker_shared.wire import DEFAULT_RESULT_TTL_S, ENDED_KEY, META_PARTIAL
from stoker_worker.outage import may_pass
from stoker_worker.rq_worker.aftermath import Aftermath
from stoker_worker.rq_worker.ended_note import End, EndedNote
from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.json_job import JsonJob
from stoker_worker.rq_worker.ownership import Ownership
from stoker_worker.rq_worker.progress_meta import read_meta, without_progress

_TRIES: Final = 3  # a heartbeat may have been on its way to the execution when the end was written


class PackedJson(JSONSerializer):
    """For results that wait for long in large numbers: RQ keeps them as base64, a third larger than they are."""

    @staticmethod
    def dumps(*args: Any, **options: Any) -> bytes:
        return zlib.compress(JSONSerializer.dumps(*args, **options))


class _AlreadyWritten(Exception):
    """This worker has written the end before, and the reply was lost."""

    def __init__(self, note: EndedNote) -> None:
        self.note = note


class OwnedQueue(Queue):
    """A queue whose part in RQ's success transaction begins with a check.

    RQ calls `move_dependents_to_ready` inside its WATCH loop, before the transaction and again for each new try.
    """

    ending: "_Ending"
    retries_in_place = False

    def _enqueue_job(
        self, job: Job, pipeline: Pipeline | None = None, at_front: bool = False, unique: bool = False
    ) -> Job:
        """RQ puts a job that is retried at once behind all others, also behind its own agent's next one."""
        return super()._enqueue_job(job, pipeline, at_front or self.retries_in_place, unique)

    def move_dependents_to_ready(
        self, job: Job, pipeline: Pipeline | None = None, *args: Any, **options: Any
    ) -> dict[str, list[str]]:
        assert pipeline is not None  # without one it is called by the aftermath, on a queue of RQ's
        self.ending.check(pipeline)
        by_queue = super().move_dependents_to_ready(job, pipeline, *args, **options)
        self.ending.note.dependents = [job_id for ids in by_queue.values() for job_id in ids]
        return by_queue

    def enqueue_ready_jobs_by_queue(self, job_ids_by_queue_name: dict[str, list[str]]) -> None:
        """Nothing: the aftermath does it, and knows when it was not done."""


class _Ending:
    """One try to end a job: its note, and the check that begins the transaction."""

    def __init__(self, ownership: Ownership, handle: RqHandle, end: End, partial_text: str | None = None) -> None:
        self._ownership = ownership
        self._handle = handle
        self._partial_text = partial_text
        self._changes_meta = False
        self.note = EndedNote(end, rate_limit=handle.job.rate_limit_key or "")

    def written(self) -> EndedNote | None:
        """The note, when this end was written already.

        Raises:
            OwnershipLost: the execution is not ours (any more), or has ended in another way.
        """
        state = self._ownership.of(self._handle)
        if state == "ours":
            return None
        if state == "lost" or state.end != self.note.end:
            raise OwnershipLost(f"job {self._handle.job.id} is no longer this worker's, or has ended already")
        return state

    def check(self, pipeline: Pipeline) -> None:
        """Watch what says that the execution is ours, then look: a change from here on undoes the transaction."""
        self._ownership.watch(pipeline, self._handle)
        if (note := self.written()) is not None:
            raise _AlreadyWritten(note)
        if self._handle.job.has_progress or self._partial_text is not None:
            self._read_meta(pipeline)

    def open_failure(self, pipeline: Pipeline) -> None:
        """RQ has a WATCH in the transaction of a success, and none in that of a failure."""
        rq_job = self._handle.job
        self.check(pipeline)
        self.note.dependents = rq_job.dependent_ids
        pipeline.multi()
        self._write_meta(pipeline)

    def _read_meta(self, pipeline: Pipeline) -> None:
        """As it is now, which its producer may have changed since; the transaction is undone if that happens again."""
        rq_job = self._handle.job
        if (fields := read_meta(pipeline.hget(rq_job.key, "meta"))) is not None:
            rq_job.meta = without_progress(fields)  # RQ writes it once more when it tries the job again
            if self._partial_text is not None:
                rq_job.meta[META_PARTIAL] = self._partial_text
            self._changes_meta = True

    def _write_meta(self, pipeline: Pipeline) -> None:
        rq_job = self._handle.job
        if self._changes_meta and rq_job.meta:
            pipeline.hset(rq_job.key, "meta", rq_job._serialize_meta())
        elif self._changes_meta:
            pipeline.hdel(rq_job.key, "meta")

    def finish_with_note(self, pipeline: Pipeline) -> None:
        if self._handle.job.get_result_ttl(DEFAULT_RESULT_TTL_S) != 0:  # else the job is deleted at its end
            self._write_meta(pipeline)
        self.write_note(pipeline)

    def write_note(self, pipeline: Pipeline) -> None:
        handle = self._handle
        pipeline.hset(ENDED_KEY.format(queue=handle.job.origin), handle.execution.composite_key, self.note.to_json())


class JobEnder:
    """The last word on jobs of this worker."""

    def __init__(self, connection: Redis, identity: RqIdentity, ownership: Ownership, aftermath: Aftermath) -> None:
        self._connection = connection
        self._identity = identity
        self._ownership = ownership
        self._aftermath = aftermath

    def finish(self, handle: RqHandle, result: Mapping[str, Any]) -> None:
        """
        Raises:
            OwnershipLost: the execution is not ours (any more), or it is finished already.
        """
        ending = _Ending(self._ownership, handle, "finished")
        try:
            self._write_success(handle, ending, result)
        except _AlreadyWritten as written:
            ending.note = written.note
        except Exception as error:
            # RQ passes a place under a rate limit on after its transaction, and cannot read every one.
            note = None if may_pass(error) else ending.written()
            if note is None:
                raise
            ending.note = note
        self._follow_up(handle, ending.note)

    def fail(
        self, handle: RqHandle, error: Exception, *, partial_text: str | None = None, may_retry: bool = True
    ) -> None:
        """
        Raises:
            OwnershipLost: the execution is not ours (any more).
            RedisUnavailable: RQ could not write it.
        """
        rq_job, ending = handle.job, _Ending(self._ownership, handle, "failed", partial_text)
        if isinstance(error, RequestError) or not may_retry:
            rq_job.retries_left = 0  # the same request fails the same way
        self._end_badly(handle, ending, f"{type(error).__name__}: {error}")

    def stop(self, handle: RqHandle) -> bool:
        """End a job that was stopped on request, canceled or deleted; ``True`` for one that was stopped."""
        if self._ownership.of(handle) == "lost":
            self._ownership.let_go(handle)
            return False
        self._end_badly(handle, _Ending(self._ownership, handle, "stopped"), "JobStopped: stopped on request")
        return True

    def _end_badly(self, handle: RqHandle, ending: _Ending, reason: str) -> None:
        for _ in range(_TRIES):
            note = ending.written()
            if note is None:
                self._write_failure(handle, ending, reason)
                note = ending.written()
            if note is not None:
                self._follow_up(handle, note)
                return
        raise RedisUnavailable(f"the failure of job {handle.job.id} could not be written")

    def _follow_up(self, handle: RqHandle, note: EndedNote) -> None:
        self._aftermath.carry_out(handle.job.origin, handle.execution.composite_key, note)

    def _queue_of(self, ending: _Ending, rq_job: JsonJob) -> OwnedQueue:
        queue = OwnedQueue(rq_job.origin, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
        queue.ending = ending
        return queue

    def _write_success(self, handle: RqHandle, ending: _Ending, result: Mapping[str, Any]) -> None:
        rq_job = handle.job
        rq_job.ended_at = rq_job.last_heartbeat = now()  # written with the rest
        rq_job._result = dict(result)
        rq_job.serializer = PackedJson if rq_job.packs_result else JSONSerializer
        rq_job._status = JobStatus.FINISHED
        rq_job.write_note = ending.finish_with_note
        repeat = rq_job.repeats_left, rq_job.repeat_intervals
        queue = self._queue_of(ending, rq_job)
        try:
            self._identity.handle_job_success(
                job=rq_job,
                queue=queue,
                started_job_registry=queue.started_job_registry,
                execution=handle.execution,
            )
        except BaseException:  # RQ counts a repeat before it has written it; the next try must not count it twice
            rq_job.repeats_left, rq_job.repeat_intervals = repeat
            raise
        finally:
            rq_job.serializer = JSONSerializer

    def _write_failure(self, handle: RqHandle, ending: _Ending, reason: str) -> None:
        """RQ logs and swallows what happens to its transaction, be it undone, refused, or written without a reply."""
        rq_job = handle.job
        rq_job._status = JobStatus.FAILED
        rq_job.ended_at = rq_job.last_heartbeat = now()
        if ending.note.end == "stopped":
            self._identity._stopped_job_id = rq_job.id
        retries_left = rq_job.retries_left
        queue = self._queue_of(ending, rq_job)
        queue.retries_in_place = True
        rq_job.check, rq_job.write_note = ending.open_failure, ending.write_note
        try:
            with suppress(_AlreadyWritten):
                self._identity.handle_job_failure(
                    job=rq_job,
                    queue=queue,
                    started_job_registry=queue.started_job_registry,
                    exc_string=reason,
                    execution=handle.execution,
                )
        finally:  # as with repeats
            rq_job.retries_left, rq_job.check, self._identity._stopped_job_id = retries_left, None, None
