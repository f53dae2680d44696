"""One atomic step that takes a claimed or started job back to the front of its queue. Any thread with a connection."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis import Redis
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution, ExecutionRegistry
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry

from stoker_shared.wire import FIELD_ATTEMPTS, FIELD_DELIVERY, FIELD_LOST_ALONE, LEASE_KEY
from stoker_worker.rq_worker.job_ids import raw
from stoker_worker.rq_worker.json_job import DELIVERY
from stoker_worker.rq_worker.lease import Lease

Outcome = Literal["requeued", "stands", "ended"]

# Only a job's first loss can be one among others: from then on it runs alone.
# Nothing is written by a worker that lost its lease: what it has in flight is the new holder's to put back. And nothing
# is written unless the job still stands where a claimed or started job stands, so doing this twice, or after
# the job was finished, canceled or deleted by somebody else, changes nothing.
_REQUEUE = (
    DELIVERY
    + """
if redis.call('GET', KEYS[8]) ~= ARGV[6] then return 'ended' end
local queue, intermediate, wip, job = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local job_id, member, execution_id, counts = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local claimed = redis.call('LREM', intermediate, 1, job_id)
local started = member ~= '' and redis.call('ZSCORE', wip, member)
local status = redis.pcall('HGET', job, 'status') -- of a key that is no hash: an error, which is no status
if claimed == 0 and not started then
  return status == 'queued' and redis.call('LPOS', queue, job_id) and 'stands' or 'ended'
end
local runs = status == 'started' or status == 'queued'
if started and status == 'queued' then -- its id was enqueued again while it ran
  local named = ARGV[7] .. (redis.call('HGET', job, 'origin') or '')
  local stands = redis.call('LPOS', named, job_id)
  local ran = redis.call('HGET', KEYS[5], ARGV[8])
  if stands and ran and ran ~= delivery(job) then
    runs = false -- another delivery, which has a place of its own
    redis.call('HDEL', job, ARGV[5], ARGV[10])
  else
    redis.call('LREM', named, 0, job_id)
    redis.call('LREM', queue, 0, job_id)
    redis.call('HSET', job, 'origin', ARGV[9])
  end
end
local function count(field)
  local n = (tonumber(redis.call('HGET', job, field)) or 0) + 1
  redis.call('HSET', job, field, n)
  return n
end
if runs and started and counts == '1' and (count(ARGV[5]) > 1 or ARGV[11] == '1') then count(ARGV[10]) end
if started then
  redis.call('ZREM', wip, member)
  redis.call('DEL', KEYS[5])
  redis.call('ZREM', KEYS[6], execution_id)
  redis.call('SREM', KEYS[7], member)
end
if not runs then return 'ended' end
redis.call('HSET', job, 'status', 'queued')
redis.call('HDEL', job, 'worker_name')
redis.call('LPUSH', queue, job_id)
return 'requeued'
"""
)


@dataclass(frozen=True)
class InFlight:
    """A job id out of its queue.

    Attributes:
        execution: ``None`` for one that was claimed but not started.
        owner_died: its worker is gone; else it is our own, left over from a lost connection.
        alone: nothing else was in flight beside it.
    """

    job_id: str
    queue: str
    execution: Execution | None
    owner_died: bool = False
    alone: bool = False


class Requeue:
    """Puts jobs back."""

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease
        self._script = connection.register_script(_REQUEUE)

    def __call__(self, lost: InFlight, *, counts_as_attempt: bool) -> Outcome:
        """
        Returns:
            ``requeued``; ``stands`` when the job waits in its queue already, as after a lost reply; ``ended`` when
            there was nothing to put back, or the queue is not ours any more.
        """
        outcome: Outcome = self._run(lost, self._connection, counts_as_attempt=counts_as_attempt).decode()
        return outcome

    def all(self, lost: Sequence[InFlight]) -> int:
        """In one transaction, or whoever goes on after it broke off half-way would take the rest for all there was.

        Returns:
            how many were put back.
        """
        if not lost:
            return 0
        with self._connection.pipeline(transaction=True) as pipeline:
            for each in lost:
                self._run(each, pipeline, counts_as_attempt=each.owner_died)
            return pipeline.execute().count(b"requeued")

    def _run(self, lost: InFlight, client: Redis, *, counts_as_attempt: bool) -> Any:
        queue_key = Queue(lost.queue, connection=self._connection).key
        execution = lost.execution
        member = execution.composite_key if execution else ""
        keys: list[str | bytes] = [
            queue_key,
            IntermediateQueue.get_intermediate_queue_key(queue_key),
            StartedJobRegistry(lost.queue, connection=self._connection).key,
            raw(Job.key_for(lost.job_id)),
            execution.key if execution else "",
            raw(ExecutionRegistry(lost.job_id, connection=self._connection).key),
            WORKER_EXECUTIONS_KEY_TEMPLATE.format(execution.worker_name if execution else ""),
            LEASE_KEY.format(queue=lost.queue),
        ]
        args: list[str | bytes | int] = [
            raw(lost.job_id),
            member,
            execution.id if execution else "",
            int(counts_as_attempt),
            FIELD_ATTEMPTS,
            self._lease.held_value(lost.queue),
            Queue.redis_queue_namespace_prefix,
            FIELD_DELIVERY,
            lost.queue,
            FIELD_LOST_ALONE,
            int(lost.alone),
        ]
        return self._script(keys=keys, args=args, client=client)
