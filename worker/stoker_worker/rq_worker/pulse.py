"""What the heartbeat thread writes: the lease, what shows that the worker lives, the executions. Heartbeat thread.

Owns a connection of its own, whose time limit is short: one that hangs is given up before the lease has run out.
Nothing here waits for a thread that ends jobs.
"""

from redis import Redis
from rq.executions import ExecutionRegistry
from rq.utils import now, utcformat

from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.lease import Lease

# What is gone stays gone: an execution's id is never used again.
_BEAT = """
local execution, wip, of_job, job, of_worker = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, member, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', execution) == 0 then return 0 end
redis.call('HSET', execution, 'last_heartbeat', ARGV[4])
redis.call('EXPIRE', execution, ttl)
redis.call('ZADD', wip, 'XX', math.floor(now) + ttl, member)
redis.call('ZADD', of_job, 'XX', math.floor(now) + ttl + 60, id)
redis.call('EXPIRE', of_job, ttl + 60)
redis.call('SADD', of_worker, member)
redis.call('EXPIRE', of_worker, ttl + 60)
if redis.call('EXISTS', job) == 1 then redis.call('HSET', job, 'last_heartbeat', ARGV[5]) end
return 1
"""


class Pulse:
    """One beat of the heart at a time."""

    def __init__(self, connection: Redis, identity: RqIdentity, lease: Lease) -> None:
        """
        Args:
            connection: nobody else's, with a time limit far below the lease's.
        """
        self._connection = connection
        self._identity = identity
        self._lease = lease
        self._beat_script = connection.register_script(_BEAT)

    def beat(self) -> bool:
        """Renew the lease and what shows that the worker lives; ``False`` when the lease is somebody else's."""
        if not self._lease.renew(self._connection):
            return False
        self._identity.beat(self._connection)
        return True

    def beat_execution(self, handle: RqHandle) -> None:
        """RQ's `Execution.heartbeat`, for one that is still there."""
        rq_job, execution, ttl_s = handle.job, handle.execution, self._identity.get_heartbeat_ttl(handle.job)
        execution.last_heartbeat = rq_job.last_heartbeat = moment = now()
        keys = [
            execution.key,
            rq_job.started_job_registry.key,
            ExecutionRegistry(rq_job.id, connection=self._connection).key,
            rq_job.key,
            execution.worker_executions_key,
        ]
        args: list[str | int | float] = [execution.id, execution.composite_key, ttl_s]
        self._beat_script(keys=keys, args=[*args, moment.timestamp(), utcformat(moment)])

    def close(self) -> None:
        self._connection.close()
