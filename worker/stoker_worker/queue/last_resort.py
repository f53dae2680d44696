"""Fails jobs that RQ's own code cannot end, in one script and without RQ's objects. Owns no state; any thread.

In Redis a job's id may be any bytes, and RQ accepts only some: an entry `<job id>:<execution id>` with another colon in
it stops `rq info`, and RQ's `Job` accepts no such id. The keys beside a job's hash may have any type. Where RQ's code
breaks off, the reason is written here where producers look: hash, result stream, failed jobs.
"""

import logging
import re
import time
import zlib
from base64 import b64encode
from typing import Final

from redis import Redis
from redis.exceptions import DataError, RedisError, ResponseError, WatchError
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution, ExecutionRegistry
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.utils import now, utcformat

from stoker_shared.errors import InvalidRequest, OwnershipLost
from stoker_shared.wire import CLAIMED_KEY, DEFAULT_FAILURE_TTL_S
from stoker_worker.queue.foreign_ids import raw
from stoker_worker.queue.json_job import OF_THE_RUN
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.lease_scripts import HOLDS

log = logging.getLogger(__name__)

FOREIGN_ID: Final = InvalidRequest(
    "job_id: RQ reads only ids of letters, digits, '-' and '_'; enqueue the job under such an id"
)

# Takes effect once, and for the holder of the lease only: the id is among the claimed ones until then, or its execution
# among the started ones. No key of the job has a type that one can rely on.
_FAIL: Final = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return -1 end
local job, results, failed, job_id, member = KEYS[4], KEYS[5], KEYS[6], ARGV[4], ARGV[11]
local n_found = redis.call('LREM', KEYS[3], 1, job_id)
if member ~= '' then
  n_found = n_found + redis.call('ZREM', KEYS[7], member)
  redis.call('DEL', KEYS[8])
  redis.pcall('ZREM', KEYS[9], ARGV[12])
  redis.pcall('SREM', KEYS[10], member)
end
if n_found == 0 then return -1 end
local status = redis.pcall('HGET', job, 'status') -- false, or an error, if there is no job
local is_over = status == 'finished' or status == 'failed' or status == 'stopped' or status == 'canceled'
if type(status) == 'table' or is_over or redis.call('EXISTS', job) == 0 then return 0 end
if member ~= '' and status ~= 'started' then return 0 end
local ttl_s = math.floor(tonumber(redis.call('HGET', job, 'failure_ttl')) or -2)
if not (ttl_s >= -1 and ttl_s < 1e9) then ttl_s = tonumber(ARGV[9]) end
redis.call('HSET', job, 'status', 'failed', 'ended_at', ARGV[5], 'exc_info', ARGV[6])
redis.call('HDEL', job, unpack(ARGV, 13))
local function tell()
  return redis.pcall('XADD', results, 'MAXLEN', '10', '*', 'type', ARGV[7], 'worker_name', '', 'exc_string', ARGV[8])
end
if type(tell()) == 'table' then -- an error: it is no stream, or a stream that takes no more
  redis.call('DEL', results)
  tell()
end
if ttl_s < 0 then
  redis.call('PERSIST', job)
  redis.pcall('ZADD', failed, ttl_s, job_id)
else
  redis.call('EXPIRE', job, ttl_s)
  redis.call('EXPIRE', results, ttl_s)
  redis.pcall('ZADD', failed, tonumber(ARGV[10]) + ttl_s, job_id)
end
return 1
"""
)

# A key of another type, a number that is none, a time that no clock reaches. Other replies are about the server, as a
# right that is missing, and are no job's fault.
_OF_THE_DATA: Final = re.compile(r"\bWRONGTYPE\b|\b(hash )?value is (not|out of)\b|\binvalid expire\b")


def is_the_jobs(error: BaseException) -> bool:
    """Whether an error comes from what is in Redis of one job, so that it comes again with each try."""
    if isinstance(error, DataError | WatchError) or not isinstance(error, RedisError):
        return True
    return isinstance(error, ResponseError) and _OF_THE_DATA.search(str(error)) is not None


class LastResort:
    """Fails jobs of this worker."""

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease
        self._script = connection.register_script(_FAIL)

    def fail(self, queue_name: str, job_id: str, line: str, execution: Execution | None = None) -> None:
        """Fail a claimed or started job; only drop it if no job of this id waits or runs.

        Args:
            line: the reason.

        Raises:
            OwnershipLost: the job is not this worker's any more.
            RedisError: the server went away; recovery finds the job.
        """
        member = execution.composite_key if execution else ""
        keys: list[str | bytes] = [
            *self._lease.keys,
            CLAIMED_KEY.format(queue=queue_name, member=self._lease.member),
            raw(Job.key_for(job_id)),
            raw(Result.get_key(job_id)),
            FailedJobRegistry(queue_name, connection=self._connection).key,
            StartedJobRegistry(queue_name, connection=self._connection).key,
            execution.key if execution else "",
            raw(ExecutionRegistry(job_id, connection=self._connection).key),
            WORKER_EXECUTIONS_KEY_TEMPLATE.format(execution.worker_name if execution else ""),
        ]
        compressed = zlib.compress(line.encode(errors="replace"))
        args: list[str | bytes | int] = [*self._lease.args, raw(job_id), utcformat(now()), compressed]
        args += [Result.Type.FAILED.value, b64encode(compressed), DEFAULT_FAILURE_TTL_S, int(time.time())]
        args += [member, execution.id if execution else "", *OF_THE_RUN]
        found = self._script(keys=keys, args=args)
        if found < 0:
            raise OwnershipLost(f"job {job_id!r} is no longer this worker's")
        if found:
            log.warning("job %r refused: %s", job_id, line)
        else:
            log.error("no job of the id %r waits; the id is dropped", job_id)
