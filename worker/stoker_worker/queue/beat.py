"""Writes the heartbeat: the lease, the worker's own keys, the runs in flight. Heartbeat thread.

Owns a connection of its own with a short time limit: a connection that hangs is given up before the lease runs out.
Nothing here waits for a thread that ends jobs.
"""

from redis import Redis
from rq.executions import ExecutionRegistry
from rq.utils import now, utcformat

from stoker_worker.queue.json_job import JobRun
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.registration import RqRegistration

# A run that is gone is not brought back: an execution's id is never used again. The job's own keys may have any type;
# an error would keep the runs behind this one without a heartbeat.
_BEAT = """
local execution, wip, of_job, job, of_worker = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, member, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', execution) == 0 then return 0 end
redis.call('HSET', execution, 'last_heartbeat', ARGV[4])
redis.call('EXPIRE', execution, ttl)
redis.call('ZADD', wip, 'XX', math.floor(now) + ttl, member)
redis.pcall('ZADD', of_job, 'XX', math.floor(now) + ttl + 60, id)
redis.call('EXPIRE', of_job, ttl + 60)
redis.call('SADD', of_worker, member)
redis.call('EXPIRE', of_worker, ttl + 60)
if redis.call('EXISTS', job) == 1 then redis.pcall('HSET', job, 'last_heartbeat', ARGV[5]) end
return 1
"""


class HeartbeatWriter:
    """Writes one beat at a time."""

    def __init__(self, connection: Redis, registration: RqRegistration, lease: Lease) -> None:
        """
        Args:
            connection: used by nothing else, with a time limit far below the lease's.
        """
        self._connection = connection
        self._registration = registration
        self._lease = lease
        self._beat_script = connection.register_script(_BEAT)

    def beat(self) -> bool:
        """Renew the lease and the worker's own keys; ``False`` when the lease is another worker's."""
        if not self._lease.renew(self._connection):
            return False
        self._registration.beat(self._connection)
        return True

    def beat_execution(self, run: JobRun) -> None:
        """RQ's `Execution.heartbeat`, for an execution that still exists."""
        rq_job, execution, ttl_s = run.job, run.execution, self._registration.get_heartbeat_ttl(run.job)
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
