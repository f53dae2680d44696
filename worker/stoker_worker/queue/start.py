"""From a claimed id to a started job, or to a job that is refused with a line. Fetcher thread.

Numbers the claims. A job is started in one transaction: execution, registry entry and status, or none of them.
Malformed data in Redis fails only its own job.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, WatchError
from rq.exceptions import NoSuchJobError
from rq.executions import Execution, ExecutionRegistry
from rq.job import JobStatus
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)
from rq.worker.base import WorkerStatus

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import OwnershipLost, PayloadRefused, RequestError, StokerError
from stoker_shared.request import GenerationRequest
from stoker_shared.text import message_line
from stoker_shared.wire import (
    BATCH_KEY,
    CLAIMED_KEY,
    DEFAULT_FAILURE_TTL_S,
    DEFAULT_JOB_TIMEOUT_S,
    FIELD_DELIVERY,
    MEMBERS_KEY,
)
from stoker_worker.events import log_failure
from stoker_worker.placement.placement import Writes
from stoker_worker.ports import Delivery, LastVersion
from stoker_worker.queue.cascade import model_of
from stoker_worker.queue.claimed_job import RqClaimedJob
from stoker_worker.queue.client import lua
from stoker_worker.queue.end import FOREIGN_ID, JobFinish, is_the_jobs
from stoker_worker.queue.json_job import JobRun, JsonJob, is_rqs, raw
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.registration import RqRegistration

_TRIES: Final = 30
_WAITS: Final = (ScheduledJobRegistry, DeferredJobRegistry)
_CANCELED: Final = (CanceledJobRegistry,)
_REGISTRIES: Final = (*_WAITS, ReadyJobRegistry, FinishedJobRegistry, FailedJobRegistry, *_CANCELED)
OVER: Final = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}

log = logging.getLogger(__name__)

_READS: Final = 10


class JobStart:
    """Reads claimed jobs, starts them in RQ's terms, and numbers them."""

    def __init__(self, connection: Redis, registration: RqRegistration, lease: Lease, ends: JobFinish) -> None:
        """
        Args:
            ends: given to each claimed job; it also ends a job that cannot be run.
        """
        self._ends = ends
        self._in_flight = registration.in_flight
        self._connection = connection
        self._lease = lease
        self._transaction = StartTransaction(connection, registration, lease)
        self._last_resort = ends.last_resort
        self._claim_numbers = itertools.count()

    def start(self, queue_name: str, job_id: str, last: LastVersion | None) -> RqClaimedJob | None:
        """``None`` if there is no job of this id that can run, or if it was refused.

        Raises:
            RunsElsewhere: its id has to wait; it is still among the claimed ones.
            RedisError: the server went away meanwhile; recovery finds a job that was begun.
        """
        if not is_rqs(job_id):
            self._give_up(queue_name, job_id, FOREIGN_ID)
            return None
        for _ in range(_READS):
            try:
                return self._start(queue_name, job_id, last)
            except EnqueuedAnew:
                continue
            except RunsElsewhere:
                raise
            except Exception as error:
                self._give_up(queue_name, job_id, error)
                return None
        self._give_up(queue_name, job_id, PayloadRefused("its hash is written all the time"))
        return None

    def _give_up(self, queue_name: str, job_id: str, error: Exception, execution: Execution | None = None) -> None:
        """Fail a job that cannot be started, whose keys may hold anything and have any type.

        Raises:
            Exception: the error, if it is not about the job.
        """
        if not isinstance(error, RequestError):
            if isinstance(error, StokerError) or not is_the_jobs(error):
                raise error
            error = PayloadRefused(f"RQ cannot start the job: {message_line(error)}")
        with suppress(OwnershipLost):  # nothing is ours to write
            self._last_resort.fail(queue_name, job_id, f"{type(error).__name__}: {error}", execution)

    def _start(self, queue_name: str, job_id: str, last: LastVersion | None) -> RqClaimedJob | None:
        rq_job = self._read(job_id)
        # A job that is over was canceled since the claim, or its id was in the queue twice.
        if rq_job is None or rq_job.get_status(refresh=False) in OVER:
            log.info("no job %s waits any more; its id is dropped", job_id)
            self.drop_id(queue_name, job_id)
            return None
        rq_job.origin = queue_name
        try:
            execution = self._transaction.run(rq_job)
        except NoSuchJobError:
            self.drop_id(queue_name, job_id)
            return None
        except OwnershipLost as error:
            log.warning("not started: %s", error)
            return None
        run = JobRun(rq_job, execution)
        try:
            return self._claimed(run, rq_job.read_request(), last)
        except RequestError as error:
            log_failure(job_id, error, queue=queue_name)
            self._refuse(run, error)
        except Exception as error:
            self._give_up(queue_name, job_id, error, execution)
        return None

    def _claimed(
        self, run: JobRun, request: GenerationRequest | AgentRequest, last: LastVersion | None
    ) -> RqClaimedJob:
        if isinstance(request, GenerationRequest) and request.route and run.job.repeats_left:
            raise PayloadRefused("a job with a route ends in another queue than it began, so it cannot be repeated")
        rq_job, now = run.job, time.time()
        timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
        rq_job.drop_data()
        return RqClaimedJob(
            job_id=rq_job.id,
            queue=rq_job.origin,
            request=request,
            delivery=Delivery(rq_job.id, rq_job.raw_created_at, rq_job.repeats_left, rq_job.digest()),
            attempt=rq_job.worker_losses + 1,
            losses_alone=rq_job.losses_alone,
            enqueued_at=rq_job.enqueued_at.timestamp() if rq_job.enqueued_at else now,
            claimed_at=now,
            claim_number=next(self._claim_numbers),
            deadline=time.monotonic() + timeout_s if timeout_s > 0 else None,
            model=model_of(rq_job, request),
            last=last,
            was_saving=rq_job.was_saving,
            run=replace(run, writes=Writes.of(request, last.number if last else 0)),
            ends=self._ends,
            in_flight=self._in_flight,
        )

    def _refuse(self, run: JobRun, error: StokerError) -> None:
        for tries_left in (2, 1, 0):  # a refused job is in no table: nobody else tries again after a lost connection
            try:
                self._ends.fail(run, error)
                return
            except OwnershipLost:  # it was withdrawn just now
                self._ends.ownership.let_go(run)
                return
            except RedisError:
                if not tries_left:
                    raise

    def drop_id(self, queue_name: str, job_id: str) -> None:
        """Forget a claimed id that names no job to run."""
        key = CLAIMED_KEY.format(queue=queue_name, member=self._lease.member)
        self._connection.lrem(key, 1, raw(job_id))  # type: ignore[arg-type]

    def _read(self, job_id: str) -> JsonJob | None:
        try:
            return cast(JsonJob, JsonJob.fetch(job_id, connection=self._connection))
        except NoSuchJobError:  # its time to live in the queue has passed
            return None


class EnqueuedAnew(Exception):
    """The hash holds another delivery since it was read."""


class RunsElsewhere(Exception):
    """Another member runs an earlier delivery of this id; the id has to wait until that run has ended."""


class StartTransaction:
    """RQ's `prepare_execution` and `prepare_job_execution` as one step, and only while the claim is ours."""

    def __init__(self, connection: Redis, registration: RqRegistration, lease: Lease) -> None:
        self._connection = connection
        self._registration = registration
        self._lease = lease
        self._may_start_script = connection.register_script(lua("holds", "delivery", "may_start"))
        self._registries = [key for name in registration.queue_names() for key in self._keys(name, _REGISTRIES)]

    def run(self, rq_job: JsonJob) -> Execution:
        """
        Args:
            rq_job: as it was read; its `origin` is the queue that it was claimed from.

        Raises:
            EnqueuedAnew: the id has another delivery since the job was read.
            NoSuchJobError: the job was withdrawn, or waits or runs elsewhere.
            OwnershipLost: the claim is no longer this worker's.
            RunsElsewhere: another member runs another delivery.
            WatchError: the job is written all the time.
            RedisError: the server went away; recovery finds a job that was begun.
        """
        was_idle = self._registration.get_state() != WorkerStatus.BUSY
        tried: list[Execution] = []
        with self._connection.pipeline() as pipeline:
            while True:
                if (begun := self._try(rq_job, pipeline, tried, was_idle=was_idle)) is not None:
                    return begun

    def _try(self, rq_job: JsonJob, pipeline: Pipeline, tried: list[Execution], *, was_idle: bool) -> Execution | None:
        registration = self._registration
        try:
            leaves = self._check(pipeline, rq_job)
        except (NoSuchJobError, OwnershipLost):
            if (begun := self._begun(tried)) is not None:  # an earlier try has started it
                return begun
            raise
        pipeline.multi()
        execution = Execution.create(
            rq_job, registration.execution_ttl_s, pipeline=pipeline, worker_name=registration.name
        )
        tried.append(execution)
        registration.in_flight.starting(execution)
        if rq_job.stamp:
            pipeline.hset(execution.key, FIELD_DELIVERY, rq_job.stamp)
        rq_job.prepare_for_execution(registration.name, pipeline=pipeline)
        pipeline.persist(rq_job.key)
        for key in leaves:
            pipeline.zrem(key, rq_job.id)
        pipeline.lrem(self._claimed_key(rq_job.origin), 1, rq_job.id)
        if was_idle:
            registration.set_state(WorkerStatus.BUSY, pipeline=pipeline)
        try:
            pipeline.execute()
            return execution
        except WatchError:  # another's write has undone it; or it was carried out, and the reply was lost
            if (begun := self._begun(tried)) is None and len(tried) == _TRIES:
                raise
            return begun

    def _begun(self, tried: list[Execution]) -> Execution | None:
        """The try that was carried out after all, if any. A try that reaches the server after this look undoes itself,
        because it watches keys that the next try, or a recovery of the job, writes to."""
        return next((execution for execution in tried if self._connection.exists(execution.key)), None)

    def _check(self, pipeline: Pipeline, rq_job: JsonJob) -> list[str]:
        """Watch the keys that make the claim ours, then look: a take-over or a withdrawal from here on undoes the
        transaction.

        Without this check, a worker that slept after its claim would restart a job that another worker has finished,
        and a job that was canceled just now would be both started and canceled.

        Returns:
            keys of the registries that the id has to leave: it was used again, and RQ does not remove it there.
        """
        queue_name = rq_job.origin
        keys = [*self._lease.keys, self._claimed_key(queue_name), rq_job.key]
        pipeline.watch(*keys[1:])  # type: ignore[no-untyped-call]  # the lease is renewed every second
        over = [status.value for status in OVER]
        runs = [ExecutionRegistry(rq_job.id, connection=self._connection).key, MEMBERS_KEY]
        prefix = Execution("", rq_job.id, connection=self._connection).key
        batch = [BATCH_KEY.format(batch=rq_job.batch), *self._keys(queue_name, _CANCELED)]
        ttl_s = DEFAULT_FAILURE_TTL_S if rq_job.failure_ttl is None else rq_job.failure_ttl
        args = [*self._lease.args, rq_job.id, rq_job.stamp, FIELD_DELIVERY, self._registration.name, prefix]
        may_start: int = self._may_start_script(
            keys=[*keys, *self._keys(queue_name, _WAITS), *runs, *batch, *self._registries], args=[*args, ttl_s, *over]
        )
        if may_start == -2:
            raise EnqueuedAnew
        if may_start == -3:
            raise RunsElsewhere
        if may_start < 0:
            raise NoSuchJobError
        if may_start == 0:
            raise OwnershipLost(f"job {rq_job.id} is no longer claimed by this worker")
        return self._registries if may_start == 2 else []

    def _keys(self, queue_name: str, registries: Sequence[type[BaseRegistry]]) -> list[str]:
        return [registry(queue_name, connection=self._connection).key for registry in registries]

    def _claimed_key(self, queue_name: str) -> str:
        return CLAIMED_KEY.format(queue=queue_name, member=self._lease.member)
