"""One try to end a job, inside RQ's own transactions: the check that begins it, and the note that ends it. Finisher
threads (fetcher: refused jobs).

RQ calls `OwnedQueue.move_dependents_to_ready` in the transaction of a success, and `JsonJob.before_end` in that of a
failure; both check that the run is ours. It calls `RqRegistration.cleanup_execution` last, and that `JsonJob.at_end`,
which writes the note.
"""

from collections.abc import Mapping
from typing import Any, Final

from redis.client import Pipeline
from rq.job import Job
from rq.queue import Queue

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import DEFAULT_RESULT_TTL_S, ENDED_KEY, META_PARTIAL
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.json_job import JobRun
from stoker_worker.queue.ownership import End, EndedNote, Ownership
from stoker_worker.queue.progress_meta import read_meta, without_progress

_TRIES: Final = 30


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

    def __init__(
        self,
        ownership: Ownership,
        placement: Placement,
        run: JobRun,
        end: End,
        *,
        partial_text: str | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """`result`: of a job that has finished."""
        self._ownership = ownership
        self._placement = placement
        self._run = run
        self._partial_text = partial_text
        self._result = result or {}
        self._changes_meta = False
        self._n_checks = 0
        rate_limit = None if end == "escalated" else run.job.rate_limit_key  # it keeps its place
        self.note = EndedNote(end, rate_limit=rate_limit or "", member=ownership.member)

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
        if self._n_checks > _TRIES:
            raise RuntimeError(f"job {self._run.job.id} is written all the time")
        self._ownership.watch(pipeline, self._run)
        if (note := self.written()) is not None:
            raise AlreadyWritten(note)
        if self._run.job.has_progress or self._partial_text is not None:
            self._read_meta(pipeline)

    def open(self, pipeline: Pipeline) -> None:
        """Begin a transaction that is not a success: RQ watches no keys in that of a failure."""
        self.check(pipeline)
        if self.note.end != "escalated":
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
        if self._run.writes is not None:
            self._placement.wrote(pipeline, self._run.writes, self._result)
        self.write_note(pipeline)

    def write_note(self, pipeline: Pipeline) -> None:
        key = ENDED_KEY.format(queue=self._run.job.origin)
        pipeline.hset(key, self._run.execution.composite_key, self.note.to_json())
