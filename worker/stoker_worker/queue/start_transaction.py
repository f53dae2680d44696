"""The transaction that starts a claimed job: execution, registry entry and status, or none of them. Fetcher thread."""

from collections.abc import Sequence
from typing import Final

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError
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

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import BATCH_KEY, CLAIMED_KEY, DEFAULT_FAILURE_TTL_S, FIELD_DELIVERY, MEMBERS_KEY
from stoker_worker.queue.json_job import DELIVERY, JsonJob
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.lease_scripts import HOLDS
from stoker_worker.queue.registration import RqRegistration

_TRIES: Final = 30
_WAITS: Final = (ScheduledJobRegistry, DeferredJobRegistry)
_CANCELED: Final = (CanceledJobRegistry,)
_REGISTRIES: Final = (*_WAITS, ReadyJobRegistry, FinishedJobRegistry, FailedJobRegistry, *_CANCELED)
OVER: Final = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}

# 1: this worker still has the claim. 2: the same, but a registry still holds the id from an earlier job. 0: it has not.
# -1: it was withdrawn since it was read; or its batch is canceled, so this script canceled it; or its id was enqueued
# while it waits in another registry; or another member runs this delivery. -2: it was enqueued anew since it was read.
# -3: another member runs another delivery of its id.
_MAY_START = (
    HOLDS
    + DELIVERY
    + """
local function is_in(registry, job_id) -- any producer can write a registry of another type, if there is none yet
  return type(redis.pcall('ZSCORE', registry, job_id)) == 'string'
end
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, job_id, stamp = KEYS[4], ARGV[4], ARGV[5]
if not redis.call('LPOS', KEYS[3], job_id) then return 0 end
local status = redis.call('HGET', job, 'status')
for i = 10, #ARGV do
  if status == ARGV[i] then return -1 end
end
if redis.call('EXISTS', job) == 0 then return -1 end
if status == 'scheduled' and is_in(KEYS[5], job_id) then return -1 end
if status == 'deferred' and is_in(KEYS[6], job_id) then return -1 end
if stamp ~= '' and stamp ~= delivery(job) then return -2 end
if KEYS[9] ~= 'stoker:batch:' and type(redis.pcall('HGET', KEYS[9], 'canceled')) == 'string' then
  redis.call('HSET', job, 'status', 'canceled')
  redis.pcall('ZADD', KEYS[10], redis.call('TIME')[1], job_id)
  if tonumber(ARGV[9]) > 0 then redis.pcall('EXPIRE', job, ARGV[9]) end
  return -1
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[7], 0, -1)) do
  local run = redis.call('HMGET', ARGV[8] .. id, 'worker_name', ARGV[6])
  if run[1] and run[1] ~= ARGV[7] then
    for _, member in ipairs(redis.call('HVALS', KEYS[8])) do
      if string.find(member, '"' .. run[1] .. '"', 1, true) then return run[2] == delivery(job) and -1 or -3 end
    end
  end
end
for i = 5, #KEYS do
  if (i < 7 or i > 10) and is_in(KEYS[i], job_id) then return 2 end
end
return 1
"""
)


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
        self._may_start_script = connection.register_script(_MAY_START)
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
        registration.stop_requests.starting(execution)
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
