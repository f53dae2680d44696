"""One atomic step that takes a claimed or started job back to the front of its queue. Any thread with a connection."""

from dataclasses import dataclass
from typing import Literal

from redis import Redis
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution, ExecutionRegistry
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry

from stoker_shared.wire import FIELD_ATTEMPTS

Outcome = Literal["requeued", "exhausted", "ended"]

# Nothing is written unless the job still stands where a claimed or started job stands, so doing this twice, or after
# the job was finished, canceled or deleted by somebody else, changes nothing.
_REQUEUE = """
local queue, intermediate, wip, job = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local job_id, member, execution_id, counts, max_attempts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local claimed = redis.call('LREM', intermediate, 1, job_id)
local started = member ~= '' and redis.call('ZSCORE', wip, member)
if claimed == 0 and not started then return 'ended' end
local status = redis.call('HGET', job, 'status')
local runs = status == 'started' or status == 'queued'
if runs and started and counts == '1' then
  local deaths = (tonumber(redis.call('HGET', job, ARGV[6])) or 0) + 1
  redis.call('HSET', job, ARGV[6], deaths)
  if deaths >= max_attempts then return 'exhausted' end
end
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


@dataclass(frozen=True)
class InFlight:
    """A job id out of its queue. `execution` is ``None`` for one that was claimed but not started."""

    job_id: str
    queue: str
    execution: Execution | None


class Requeue:
    """Puts jobs back."""

    def __init__(self, connection: Redis, *, max_attempts: int) -> None:
        """
        Args:
            max_attempts: a job that is lost this many times is not put back.
        """
        self._connection = connection
        self._script = connection.register_script(_REQUEUE)
        self._max_attempts = max_attempts

    def __call__(self, lost: InFlight, *, counts_as_attempt: bool) -> Outcome:
        """
        Returns:
            ``requeued``; ``exhausted`` when it was lost too often (it then still stands as started, to be failed); or
            ``ended`` when there was nothing to put back.
        """
        queue_key = Queue(lost.queue, connection=self._connection).key
        execution = lost.execution
        member = execution.composite_key if execution else ""
        keys = [
            queue_key,
            IntermediateQueue.get_intermediate_queue_key(queue_key),
            StartedJobRegistry(lost.queue, connection=self._connection).key,
            Job.key_for(lost.job_id),
            execution.key if execution else "",
            ExecutionRegistry(lost.job_id, connection=self._connection).key,
            WORKER_EXECUTIONS_KEY_TEMPLATE.format(execution.worker_name if execution else ""),
        ]
        args = [
            lost.job_id,
            member,
            execution.id if execution else "",
            int(counts_as_attempt),
            self._max_attempts,
            FIELD_ATTEMPTS,
        ]
        outcome: Outcome = self._script(keys=keys, args=args).decode()
        return outcome
