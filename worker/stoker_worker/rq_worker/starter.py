"""From a claimed id to a started job, or to one that is refused with a line. Inbox thread.

Owns the count of jobs started. Whatever a stranger wrote into Redis costs that one job, never the ones beside it.
"""

import itertools
import logging
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Final, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError
from rq.exceptions import NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import JobStatus
from rq.queue import Queue
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)

from stoker_shared.agent_request import AgentRequest
from stoker_shared.errors import OwnershipLost, PayloadRefused, RedisUnavailable, RequestError
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import DEFAULT_JOB_TIMEOUT_S
from stoker_worker.ports import ClaimedJob, Delivery
from stoker_worker.rq_worker.foreign_ids import ForeignIds
from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.job_ids import is_rqs, raw
from stoker_worker.rq_worker.json_job import DELIVERY, JsonJob
from stoker_worker.rq_worker.lease import HOLDS, Lease

log = logging.getLogger(__name__)

_WAITS: Final = (ScheduledJobRegistry, DeferredJobRegistry)
_REGISTRIES: Final = (*_WAITS, ReadyJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
_OVER: Final = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}

_READS: Final = 10

# Still claimed by us; -1 for a job that was withdrawn since it was read, or that waits elsewhere: its id was enqueued
# beside that. -2 for one that was enqueued anew since it was read. 2 when a registry still has what had the id before.
_MAY_START = (
    HOLDS
    + DELIVERY
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, job_id, stamp = KEYS[4], ARGV[4], ARGV[5]
if not redis.call('LPOS', KEYS[3], job_id) then return 0 end
local status = redis.call('HGET', job, 'status')
for i = 6, #ARGV do
  if status == ARGV[i] then return -1 end
end
if redis.call('EXISTS', job) == 0 then return -1 end
if status == 'scheduled' and redis.call('ZSCORE', KEYS[5], job_id) then return -1 end
if status == 'deferred' and redis.call('ZSCORE', KEYS[6], job_id) then return -1 end
if stamp ~= '' and stamp ~= delivery(job) then return -2 end
for i = 5, #KEYS do
  if redis.call('ZSCORE', KEYS[i], job_id) then return 2 end
end
return 1
"""
)


class _EnqueuedAnew(Exception):
    """Another delivery stands under the id since it was read."""


class JobStarter:
    """Starts jobs in RQ's terms: execution, registry entry, status; numbers them."""

    def __init__(
        self,
        connection: Redis,
        identity: RqIdentity,
        lease: Lease,
        *,
        callbacks: Container[str],
        refuse: Callable[[RqHandle, RequestError], None],
    ) -> None:
        """
        Args:
            callbacks: paths of the functions a job may name.
            refuse: ends a started job that cannot be run.
        """
        self._callbacks = callbacks
        self._connection = connection
        self._identity = identity
        self._lease = lease
        self._refuse = refuse
        self._may_start = connection.register_script(_MAY_START)
        self._foreign_ids = ForeignIds(connection, lease)
        self._registries = {name: self._keys(name, _REGISTRIES) for name in identity.queue_names()}
        self._claim_numbers = itertools.count()

    def start(self, queue_name: str, job_id: str) -> ClaimedJob | None:
        """``None`` when there is nothing to run behind the id, or what is there was refused.

        Raises:
            RedisError: the server went away in between; recovery finds what was begun.
        """
        if not is_rqs(job_id):
            self._foreign_ids.fail(queue_name, job_id)
            return None
        for _ in range(_READS):
            with suppress(_EnqueuedAnew):
                return self._start(queue_name, job_id)
        raise RedisUnavailable(f"job {job_id} is enqueued anew all the time")  # put back, and tried again

    def _start(self, queue_name: str, job_id: str) -> ClaimedJob | None:
        try:
            rq_job, broken = self._read(job_id)
        except ResponseError as error:  # the key is no hash
            log.error("%s is no job, its id is dropped: %s", job_id, error)
            rq_job = None
        # A job that is over was canceled since the claim, or its id stood in the queue twice.
        if rq_job is None or rq_job.get_status(refresh=False) in _OVER:
            self.drop_id(queue_name, job_id)
            return None
        rq_job.origin = queue_name
        try:
            execution = self._identity.begin(rq_job, lambda pipeline: self._check(pipeline, queue_name, rq_job))
        except NoSuchJobError:
            self.drop_id(queue_name, job_id)
            return None
        except OwnershipLost as error:
            log.warning("not started: %s", error)
            return None
        handle = RqHandle(rq_job, execution)
        try:
            if broken is not None:
                raise broken
            return _claimed(handle, rq_job.read_request(callbacks=self._callbacks), next(self._claim_numbers))
        except RequestError as error:
            log.warning("job %s refused: %s: %s", job_id, type(error).__name__, error)
            self._refuse(handle, error)
            return None

    def drop_id(self, queue_name: str, job_id: str) -> None:
        """Forget a claimed id behind which there is nothing to run."""
        key = self._intermediate_key(queue_name)
        self._connection.lrem(key, 1, raw(job_id))  # type: ignore[arg-type]

    def _check(self, pipeline: Pipeline, queue_name: str, rq_job: JsonJob) -> list[str]:
        """Watch what says that the claim is ours, then look: whoever takes over from here on, or withdraws the job,
        undoes the transaction.

        Without it a worker that slept since its claim would start a job again that another has finished meanwhile, and
        a job that was canceled just now would stand as started and as canceled.

        Returns:
            keys of the registries that the id has to leave: it was used again, and RQ leaves it where it was.
        """
        keys = [*self._lease.keys(queue_name), self._intermediate_key(queue_name), rq_job.key]
        pipeline.watch(*keys[1:])  # type: ignore[no-untyped-call]  # the lease is renewed every second
        over = [status.value for status in _OVER]
        registries = [key for of_queue in self._registries.values() for key in of_queue]
        args = [*self._lease.args(queue_name), rq_job.id, rq_job.stamp, *over]
        may_start: int = self._may_start(keys=[*keys, *self._keys(queue_name, _WAITS), *registries], args=args)
        if may_start == -2:
            raise _EnqueuedAnew
        if may_start < 0:
            raise NoSuchJobError
        if may_start == 0:
            raise OwnershipLost(f"job {rq_job.id} is no longer claimed by this worker")
        return registries if may_start == 2 else []

    def _keys(self, queue_name: str, registries: Sequence[type[BaseRegistry]]) -> list[str]:
        return [registry(queue_name, connection=self._connection).key for registry in registries]

    def _intermediate_key(self, queue_name: str) -> str:
        return IntermediateQueue.get_intermediate_queue_key(Queue(queue_name, connection=self._connection).key)

    def _read(self, job_id: str) -> tuple[JsonJob | None, RequestError | None]:
        """The job, and why it cannot be read, if so; no job when there is none (any more)."""
        try:
            return cast(JsonJob, JsonJob.fetch(job_id, connection=self._connection)), None
        except NoSuchJobError:  # its time to live in the queue has passed
            return None, None
        except RedisError:
            raise
        except Exception as error:  # any field of the hash may hold anything
            rq_job = JsonJob(job_id, connection=self._connection)
            rq_job.data = b"[]"
            return rq_job, PayloadRefused(f"the job's hash cannot be read: {type(error).__name__}: {error}")


def _claimed(handle: RqHandle, request: GenerationRequest | AgentRequest, claim_number: int) -> ClaimedJob:
    rq_job, now = handle.job, time.time()
    timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
    return ClaimedJob(
        job_id=rq_job.id,
        queue=rq_job.origin,
        request=request,
        delivery=Delivery(rq_job.id, rq_job.raw_created_at, rq_job.repeats_left, rq_job.digest()),
        attempt=rq_job.deaths + 1,
        lost_alone=rq_job.lost_alone,
        enqueued_at=rq_job.enqueued_at.timestamp() if rq_job.enqueued_at else now,
        claimed_at=now,
        claim_number=claim_number,
        deadline=time.monotonic() + timeout_s if timeout_s > 0 else None,
        handle=handle,
    )
