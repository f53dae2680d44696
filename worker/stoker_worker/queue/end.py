"""Ends jobs, each once and only while it is ours, whichever reply is lost. Finisher threads; the fetcher thread for
jobs that are refused, were misread, or are recovered.

`RqClaimedJob` is a job in flight. `Requeue` puts a job back at the front of its queue; `JobFinish` writes the other
ends. An end consists of the commands that RQ's own code issues for it. They are recorded and carried out by one script
(`ownership.py`), which also enqueues the jobs that depend on this one.
"""

import logging
import re
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import DataError, RedisError, ResponseError, WatchError
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.registry import FailedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from stoker_shared.errors import InvalidRequest, OwnershipLost, RedisUnavailable, RequestError, StokerError
from stoker_shared.route import RouteStep
from stoker_shared.text import message_line
from stoker_shared.wire import (
    DEFAULT_FAILURE_TTL_S,
    DEFAULT_RESULT_TTL_S,
    FIELD_ATTEMPTS,
    FIELD_DELIVERY,
    FIELD_LOST_ALONE,
    META_PARTIAL,
)
from stoker_worker.events import log_job
from stoker_worker.placement.placement import Placement
from stoker_worker.ports import ClaimedJob
from stoker_worker.queue.cascade import CheckOutcome, count, escalation, verdict_after, verdict_on
from stoker_worker.queue.client import as_redis_unavailable, lua
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.json_job import OF_THE_RUN, JobRun, JsonJob, keys_of, raw
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.ownership import Ownership, RunEnd
from stoker_worker.queue.progress import JobStreams, ProgressMeta, read_meta, without_progress
from stoker_worker.queue.registration import RqRegistration

log = logging.getLogger(__name__)

_FOR_EVER_S: Final = 366 * 86_400.0
_MARGIN_S: Final = 3600.0
"""Longer than any lease, and than the difference between the clocks of two machines."""

FOREIGN_ID: Final = InvalidRequest(
    "job_id: RQ reads only ids of letters, digits, '-' and '_'; enqueue the job under such an id"
)
# Errors caused by a job's data: a key of another type, an invalid number, an expiry out of range. All others are about
# the server, such as a missing right.
_OF_THE_DATA: Final = re.compile(r"\bWRONGTYPE\b|\b(hash )?value is (not|out of)\b|\binvalid expire\b")

_FIELDS: Final = (FIELD_ATTEMPTS, FIELD_LOST_ALONE, FIELD_DELIVERY)

Outcome = Literal["requeued", "waits", "ended"]


@dataclass(frozen=True)
class Claim:
    """A job id that was taken out of its queue.

    Attributes:
        execution: ``None`` for an id that RQ's own dequeue has left in the list `left_in`.
        worker_lost: its worker is gone, which counts as a loss; otherwise it is this worker's own.
        alone: no other job was in flight beside it.
    """

    job_id: str
    queue: str
    execution: Execution | None
    worker_lost: bool = False
    alone: bool = False
    left_in: str = ""


class Requeue:
    """Puts back the jobs of the member whose lease this worker holds, each in one step: its own, or a dead member's."""

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease
        self._script = connection.register_script(lua("delivery", "rewritten", "requeue"))

    def __call__(self, claim: Claim, *, counts_as_attempt: bool) -> Outcome:
        """``requeued``; ``waits``: the job was in its queue already, as after a lost reply; ``ended``: there was
        nothing to put back, or the lease is not ours any more."""
        outcome: Outcome = self._run(claim, self._connection, counts_as_attempt=counts_as_attempt).decode()
        return outcome

    def all(self, claims: Sequence[Claim]) -> int:
        """Put several back; returns how many were. In one transaction: if only some were put back, the next recovery
        would take the rest for all the jobs that had run side by side."""
        if not claims:
            return 0
        with self._connection.pipeline(transaction=True) as pipeline:
            for claim in claims:
                self._run(claim, pipeline, counts_as_attempt=claim.worker_lost)
            return pipeline.execute().count(b"requeued")

    def _run(self, claim: Claim, client: Redis, *, counts_as_attempt: bool) -> Any:
        execution = claim.execution or Execution("", claim.job_id, self._connection, "")
        member = execution.composite_key if claim.execution else ""
        queue_key = Queue(claim.queue, connection=self._connection).key
        # A key that is not needed must still be one that the worker's Redis user may use.
        keys = [queue_key, claim.left_in or queue_key, *keys_of(claim.queue, execution), self._lease.keys[0]]
        counts: list[str | bytes | int] = [int(counts_as_attempt), int(claim.alone), int(bool(claim.left_in))]
        args = [raw(claim.job_id), member, execution.id, claim.queue, self._lease.value, *counts, *_FIELDS]
        return self._script(keys=keys, args=args, client=client)


def is_the_jobs(error: BaseException) -> bool:
    """True if an error is caused by one job's data in Redis, so that each try meets it again."""
    if isinstance(error, DataError | WatchError) or not isinstance(error, RedisError):
        return True
    return isinstance(error, ResponseError) and _OF_THE_DATA.search(str(error)) is not None


class PackedJson(JSONSerializer):
    """Compressed JSON, for many results that are kept for long. RQ stores it as base64, which adds a third."""

    @staticmethod
    def dumps(*args: Any, **options: Any) -> bytes:
        return zlib.compress(JSONSerializer.dumps(*args, **options))


class JobFinish:
    """Writes the ends of this worker's jobs. `streams` and `progress` show a job's text and progress until then."""

    def __init__(
        self, connection: Redis, registration: RqRegistration, ownership: Ownership, placement: Placement
    ) -> None:
        self._connection = connection
        self._registration = registration
        self.ownership = ownership
        self.requeue = Requeue(connection, ownership.lease)
        self.streams = JobStreams(connection)
        self.progress = ProgressMeta(connection)
        self._placement = placement
        self._fail_waiting = connection.register_script(lua("holds", "count", "run", "fail"))

    def finish(self, run: JobRun, result: Mapping[str, Any], verdict: CheckOutcome | None = None) -> None:
        """Write the result, and count the `verdict`. Raises `OwnershipLost` if the run is not ours, or has ended."""
        ttl_s = run.job.get_result_ttl(DEFAULT_RESULT_TTL_S)
        commands = partial(self._success, run, result, verdict, ttl_s)
        self._end(run, RunEnd(commands, "finished", ttl_s if ttl_s > 0 else None), "finished")

    def fail(self, run: JobRun, error: Exception, *, partial_text: str | None = None, may_retry: bool = True) -> None:
        """Write the failure. Raises `OwnershipLost` as `finish` does, `RedisUnavailable` if it could not be written."""
        rq_job = run.job
        if isinstance(error, RequestError) or not may_retry:
            rq_job.retries_left = 0  # the same request fails the same way
        self._end_badly(run, "failed", f"{type(error).__name__}: {message_line(error)}", partial_text)

    def stop(self, run: JobRun) -> bool:
        """End a withdrawn job as stopped; ``False`` if its run is not ours any more, as after a cancel or a delete."""
        if self.ownership.of(run) == "lost":
            self.ownership.let_go(run)
            return False
        self._end_badly(run, "stopped", "JobStopped: stopped on request", None)
        return True

    def escalate(self, run: JobRun, verdict: CheckOutcome, to: RouteStep) -> None:
        """Move the job to the next model's queue, and count the verdict. Raises `OwnershipLost` as `finish` does."""
        self._end(run, RunEnd(lambda: [*escalation(run, verdict, to), *self._removed(run)]))

    def fail_waiting(self, queue_name: str, job_id: str, line: str) -> bool:
        """Fail a waiting job that cannot be started; its keys may hold anything. If no such job waits, drop the id, and
        return ``False``.

        Raises:
            OwnershipLost: the id is not in the queue, or the lease is another worker's.
        """
        lease, key = self.ownership.lease, raw(Job.key_for(job_id))
        commands = _bare_failure(queue_name, job_id, line)
        words = [word for command in commands for word in (len(command), *command)]
        keys = [*lease.keys, Queue(queue_name, connection=self._connection).key, key]
        found = self._fail_waiting(keys=keys, args=[*lease.args, raw(job_id), *words])
        if found < 0:
            raise OwnershipLost(f"job {job_id!r} is no longer this worker's")
        if found:
            log.warning("job %r refused: %s", job_id, line)
        else:
            log.error("no job of the id %r waits; the id is dropped", job_id)
        return bool(found)

    def fail_bare(self, run: JobRun, line: str) -> None:
        """As `fail`, for a job for which RQ's own commands cannot be made or are refused."""
        job = run.job
        log.warning("job %r refused: %s", job.id, line)
        job.has_run_fields = True

        def commands() -> Sequence[Sequence[Any]]:
            return [*_bare_failure(job.origin, job.id, line), *self._removed(run)]

        self._end(run, RunEnd(commands, "failed"), "failed")

    def _end(self, run: JobRun, end: RunEnd, counts_as: Literal["finished", "failed"] | None = None) -> None:
        if run.job.has_ended:
            raise OwnershipLost(f"job {run.job.id} has ended already")
        self.ownership.end(run, end)
        run.job.has_ended = True
        if counts_as:
            self._registration.count_end(run.job, counts_as)

    def _end_badly(self, run: JobRun, how: Literal["failed", "stopped"], reason: str, partial_text: str | None) -> None:
        rq_job = run.job
        sets_free: Literal["failed", ""] = "failed" if how == "failed" and not rq_job.should_retry else ""
        commands = partial(self._failure, run, how, reason, partial_text)
        kept_s = rq_job.failure_ttl if rq_job.failure_ttl and rq_job.failure_ttl > 0 else None
        try:
            self._end(run, RunEnd(commands, sets_free, kept_s), "failed")
        except StokerError:
            raise
        except Exception as error:  # the keys of a job may hold anything, and have any type
            if not is_the_jobs(error):
                raise RedisUnavailable(f"the failure of job {rq_job.id} could not be written: {error}") from None
            log.warning("RQ cannot end job %s: %s: %s", rq_job.id, type(error).__name__, message_line(error))
            self.fail_bare(run, reason)

    def _success(
        self, run: JobRun, result: Mapping[str, Any], verdict: CheckOutcome | None, ttl_s: int
    ) -> Sequence[Sequence[Any]]:
        rq_job, recorded = run.job, self._connection.pipeline(transaction=False)
        rq_job.ended_at = rq_job.last_heartbeat = now()
        if ttl_s != 0:
            rq_job.serializer = PackedJson if rq_job.packs_result else JSONSerializer
            about = self._about_execution(run)
            Result.create(rq_job, Result.Type.SUCCESSFUL, ttl_s, dict(result), pipeline=recorded, **about)
            rq_job.serializer = JSONSerializer
            ended_at = utcformat(rq_job.ended_at)
            over: dict[Any, Any] = {"status": JobStatus.FINISHED, "ended_at": ended_at, "last_heartbeat": ended_at}
            recorded.hset(rq_job.key, mapping=over)
            rq_job.finished_job_registry.add(rq_job, ttl_s, recorded)
            _write_meta(rq_job, recorded, None)
        if ttl_s == 0:
            rq_job._status = JobStatus.FINISHED
            rq_job.cleanup(0, recorded, remove_from_queue=False)
        elif ttl_s > 0:
            recorded.expire(rq_job.key, ttl_s)
            if rq_job.has_dependencies:
                recorded.expire(rq_job.dependencies_key, ttl_s)
        if run.writes is not None:
            self._placement.ended(recorded, run.writes, result)
        counted = [count(verdict)] if verdict is not None and verdict.attempts else []
        return [*_words(recorded), *self._removed(run), *counted]

    def _failure(self, run: JobRun, how: str, reason: str, partial_text: str | None) -> Sequence[Sequence[Any]]:
        rq_job, recorded = run.job, self._connection.pipeline(transaction=False)
        rq_job.ended_at = rq_job.last_heartbeat = now()
        _write_meta(rq_job, recorded, partial_text)
        if rq_job.should_retry and how != "stopped":
            _retry(rq_job, recorded)
        else:
            rq_job.set_status(JobStatus.STOPPED if how == "stopped" else JobStatus.FAILED, recorded)
            rq_job._handle_failure(reason, recorded, **self._about_execution(run))
            if run.writes is not None:
                self._placement.ended(recorded, run.writes, {})
        return sorted([*_words(recorded), *self._removed(run)], key=lambda words: words[0] != "XADD")

    def _about_execution(self, run: JobRun) -> dict[str, Any]:
        about = {"worker_name": self._registration.name, "execution_id": run.execution.id}
        return {**about, "execution_started_at": run.execution.created_at, "execution_ended_at": run.job.ended_at}

    def _removed(self, run: JobRun) -> Sequence[Sequence[Any]]:
        """The commands that remove the run and its fields of the hash, so that an operator's requeue begins at zero."""
        recorded = self._connection.pipeline(transaction=False)
        run.execution.delete(run.job, recorded)
        if run.job.has_run_fields:
            recorded.hdel(run.job.key, *OF_THE_RUN)
        return _words(recorded)


def _words(recorded: Pipeline) -> list[Sequence[Any]]:
    return [words for words, _ in recorded.command_stack]


def _bare_failure(queue_name: str, job_id: str, line: str) -> list[Sequence[Any]]:
    """The commands that fail a job, made without RQ's objects: any of its keys but the hash may be of another type, and
    any field may be malformed."""
    ttl_s = DEFAULT_FAILURE_TTL_S
    key, results = raw(Job.key_for(job_id)), raw(Result.get_key(job_id))
    compressed = zlib.compress(line.encode(errors="replace"))
    result = ("type", Result.Type.FAILED.value, "worker_name", "", "exc_string", b64encode(compressed))
    failed = FailedJobRegistry.key_template.format(queue_name)
    return [
        ("HSET", key, "status", JobStatus.FAILED.value, "ended_at", utcformat(now()), "exc_info", compressed),
        ("DEL", results),
        ("XADD", results, "*", *result),
        ("EXPIRE", key, ttl_s),
        ("EXPIRE", results, ttl_s),
        ("ZADD", failed, int(time.time()) + ttl_s, raw(job_id)),
    ]


def _write_meta(rq_job: JsonJob, recorded: Pipeline, partial_text: str | None) -> None:
    """Write the newest `meta`, which the producer may have changed, without our progress and with the partial text."""
    if (fields := read_meta(rq_job.raw_meta)) is None:
        return
    rq_job.meta = without_progress(fields)  # RQ writes it again when it retries the job
    if partial_text is not None:
        rq_job.meta[META_PARTIAL] = partial_text
    if rq_job.meta == fields:
        return
    if rq_job.meta:
        recorded.hset(rq_job.key, "meta", rq_job._serialize_meta())
    else:
        recorded.hdel(rq_job.key, "meta")


def _retry(rq_job: JsonJob, recorded: Pipeline) -> None:
    """Replaces RQ's `Job.retry`. That one puts a job without an interval behind its agent's next job, and writes the
    status of a scheduled job before the transaction, so that a crash leaves the job in no list."""
    queue = Queue(rq_job.origin, connection=rq_job.connection, job_class=JsonJob, serializer=JSONSerializer)
    interval_s, retries_left = rq_job.get_retry_interval(), rq_job.retries_left
    rq_job.retries_left = (retries_left or 0) - 1
    try:
        if interval_s:
            queue.schedule_job(rq_job, now() + timedelta(seconds=interval_s), pipeline=recorded)
        else:
            queue._enqueue_job(rq_job, recorded, at_front=True)
    finally:  # if the commands are made again, they must not count it twice
        rq_job.retries_left = retries_left


@dataclass(frozen=True, eq=False, kw_only=True)
class RqClaimedJob(ClaimedJob):
    """See `ClaimedJob`. Recovery leaves the job alone until `release`. `saves`: set once its turn is being saved."""

    run: JobRun = field(repr=False)
    ends: JobFinish = field(repr=False)
    in_flight: "JobsInFlight[RqClaimedJob]" = field(repr=False)
    saves: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def lives_s(self) -> float:
        ttl_s = self.run.job.get_result_ttl(DEFAULT_RESULT_TTL_S)
        return _MARGIN_S + (ttl_s if 0 <= ttl_s < _FOR_EVER_S else _FOR_EVER_S)

    @property
    def moved_from(self) -> str | None:
        """``None`` also for this worker's own name, under which an earlier process made the version."""
        return None if super().moved_from == self.ends.ownership.member else super().moved_from

    @as_redis_unavailable()
    def begin_save(self) -> None:
        self.saves.set()
        with self._lost_is_told():
            ownership = self.ends.ownership
            if ownership.of(self.run, saves=True) != "ours" or not ownership.lease.has_a_turn():
                raise OwnershipLost(f"job {self.job_id} is no longer this worker's")

    @as_redis_unavailable()
    def finish(self, result: Mapping[str, Any]) -> bool:
        if (verdict := verdict_on(self.run.job, self.request, result)) is not None:
            if self._escalates(verdict):
                return False
            result = {**result, **verdict.as_fields()}
        with self._lost_is_told():
            self.ends.finish(self.run, result, verdict)
        self.ends.streams.close(self.claim_number, ended=True)
        return True

    @as_redis_unavailable()
    def fail(self, error: Exception, partial_text: str | None = None, *, may_retry: bool = True) -> bool:
        verdict = verdict_after(self.run.job, self.request, error)
        if verdict is not None and self._escalates(verdict):
            return False
        with self._lost_is_told():
            self.ends.fail(self.run, error, partial_text=partial_text, may_retry=may_retry)
        self.ends.streams.close(self.claim_number, ended=True)
        return True

    @as_redis_unavailable()
    def stop(self) -> None:
        if not self.ends.stop(self.run):
            self.ends.ownership.refuse_if_lost(self.run, self.claim_number)
        self.ends.streams.close(self.claim_number, ended=True)

    @as_redis_unavailable()
    def give_back(self, *, counts_as_attempt: bool, alone: bool = False) -> bool:
        may_be_saved = self.was_saving or self.saves.is_set()  # then the next run finds out
        if self.in_flight.is_to_stop(self.job_id) and not may_be_saved:  # only this worker knows of the stop command
            with suppress(OwnershipLost):
                self.stop()
            return False
        claim = Claim(self.job_id, self.queue, self.run.execution, alone=alone)
        if self.ends.requeue(claim, counts_as_attempt=counts_as_attempt) == "ended":
            self.ends.ownership.let_go(self.run)
            return False
        return True

    @as_redis_unavailable()
    def drop(self) -> None:
        self.ends.ownership.let_go(self.run)

    def release(self) -> None:
        self.in_flight.remove(self)
        # Last, because `withdrawn` opens streams of jobs in flight. That of a job that has ended is closed already.
        self.ends.streams.close(self.claim_number, ended=False)

    def _escalates(self, verdict: CheckOutcome) -> bool:
        """Move the job to the next model unless there is none or a stop was asked for; returns whether it was moved."""
        if verdict.next is None or self.in_flight.is_to_stop(self.job_id):
            return False
        with self._lost_is_told():
            self.ends.escalate(self.run, verdict, verdict.next)
        condition = (verdict.attempts[-1].reason or "").partition(":")[0]  # the rest may quote the request
        log_job("escalated", self.job_id, agent=self.request.agent_id, reason=condition, to=verdict.next.model)
        return True

    @contextmanager
    def _lost_is_told(self) -> Iterator[None]:
        try:
            yield
        except OwnershipLost:
            self.ends.ownership.refuse_if_lost(self.run, self.claim_number)
            raise
