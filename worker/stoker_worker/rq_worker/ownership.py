"""Whether an execution is still this worker's to end, also after its job's id was enqueued once more. Any thread.

Owns no state. Three things can have become of an execution that is not simply ours: this worker has ended it and never
got the reply; it was taken away (recovered by another worker, canceled, deleted); or somebody wrote a job with the same
id over the one that runs. If that is the same delivery, sent twice, the run goes on and what was written is put right;
if it is another one, this run is superseded, and nothing of the new one is touched.
"""

from typing import Final, Literal, cast

from redis import Redis
from redis.client import Pipeline
from rq.executions import ExecutionRegistry
from rq.queue import Queue
from rq.utils import str_to_date, utcformat

from stoker_shared.job_data import unpacked
from stoker_shared.wire import ENDED_KEY, FENCE_KEY, FIELD_ATTEMPTS, FIELD_LOST_ALONE, FIELD_TOKENS
from stoker_worker.rq_worker.ended_note import EndedNote
from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.json_job import DELIVERY, JsonJob, delivery_stamp
from stoker_worker.rq_worker.lease import HOLDS, Lease

# The execution's hash goes with its entry in the registry of started jobs, in one transaction, whoever ends it; when
# this worker does, a note takes its place.
_LOOK: Final = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 'lost' end
if redis.call('EXISTS', KEYS[4]) == 0 then return redis.call('HGET', KEYS[5], ARGV[4]) or 'lost' end
local status = redis.pcall('HGET', KEYS[3], 'status') -- of a key that is no hash: an error, which is no status
if status == 'started' then return 'ours' end
return status == 'queued' and 'enqueued' or 'lost'
"""
)

# The job stands as running again, and its id nowhere else.
_PUT_RIGHT: Final = (
    HOLDS
    + DELIVERY
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, job_id = KEYS[3], ARGV[5]
if redis.call('EXISTS', KEYS[4]) == 0 or redis.call('HGET', job, 'status') ~= 'queued' then return 0 end
if delivery(job) ~= ARGV[6] then return 0 end
redis.call('HSET', job, 'status', 'started', 'origin', ARGV[7], 'worker_name', ARGV[8], 'started_at', ARGV[9])
redis.call('PERSIST', job)
for i = 5, #KEYS do redis.call('LREM', KEYS[i], 0, job_id) end
return 1
"""
)

# One that still stands as started is left: whoever holds the queue now has to find it, to put it back. So is one that
# was put back: what was counted of it counts.
_LET_GO: Final = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local member, id = ARGV[4], ARGV[5]
if redis.pcall('HGET', KEYS[3], 'status') == 'started' then return 0 end
local stood = redis.call('ZREM', KEYS[5], member) + redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[6], id)
redis.call('SREM', KEYS[7], member)
if stood > 0 then redis.pcall('HDEL', KEYS[3], ARGV[6], ARGV[7], ARGV[8]) end
return 1
"""
)

_LOOKS: Final = 10  # somebody may write the job again between a look and what is done about it

State = Literal["ours", "lost"] | EndedNote


class Ownership:
    """Says whose an execution is, and clears up after one that is not ours any more."""

    def __init__(self, connection: Redis, lease: Lease, *, worker_name: str) -> None:
        self._connection = connection
        self._lease = lease
        self._worker_name = worker_name
        self._look = connection.register_script(_LOOK)
        self._put_right = connection.register_script(_PUT_RIGHT)
        self._let_go = connection.register_script(_LET_GO)

    def of(self, handle: RqHandle) -> State:
        """``ours``, ``lost``, or the note of an end that this worker has written.

        Also takes a lease up again that ran out while Redis was away, as `Lease.is_ours` does.
        """
        queue, execution = handle.job.origin, handle.execution
        keys = [*self._keys(handle), ENDED_KEY.format(queue=queue)]
        for _ in range(_LOOKS):
            found = self._look(keys=keys, args=[*self._lease.args(queue), execution.composite_key]).decode()
            if found == "enqueued" and self._goes_on(handle):
                continue
            if found == "ours":
                return "ours"
            return EndedNote.from_json(found) if found.startswith("{") else "lost"
        return "lost"

    def watch(self, pipeline: Pipeline, handle: RqHandle) -> None:
        """Watch what says that the execution is ours. The lease itself is renewed every second; the number changes
        when somebody else has taken it."""
        pipeline.watch(  # type: ignore[no-untyped-call]
            FENCE_KEY.format(queue=handle.job.origin), handle.execution.key, handle.job.key
        )

    def let_go(self, handle: RqHandle) -> None:
        """Remove what is left of our execution of a job that is not ours any more; the job's own state is not ours to
        write."""
        rq_job, execution = handle.job, handle.execution
        keys = [
            *self._keys(handle),
            rq_job.started_job_registry.key,
            ExecutionRegistry(rq_job.id, connection=self._connection).key,
            execution.worker_executions_key,
        ]
        args = [*self._lease.args(rq_job.origin), execution.composite_key, execution.id]
        self._let_go(keys=keys, args=[*args, FIELD_ATTEMPTS, FIELD_LOST_ALONE, FIELD_TOKENS])

    def _keys(self, handle: RqHandle) -> list[str]:
        return [*self._lease.keys(handle.job.origin), handle.job.key, handle.execution.key]

    def _goes_on(self, handle: RqHandle) -> bool:
        """Put right the hash of a job that was sent twice; ``False`` when what stands there is another delivery."""
        rq_job = handle.job
        names = ("created_at", "repeats_left", "data", "origin")
        fields = cast(list[bytes | None], self._connection.hmget(rq_job.key, names))
        created_at, repeats_left, data, origin = (value or b"" for value in fields)
        if not _is_delivery_of(rq_job, created_at, repeats_left, data):
            return False
        queues = {rq_job.origin, origin.decode(errors="replace") or rq_job.origin}
        keys = [*self._keys(handle), *(Queue(name, connection=self._connection).key for name in sorted(queues))]
        started_at = utcformat(rq_job.started_at) if rq_job.started_at else ""
        written = [delivery_stamp(created_at, repeats_left, data), rq_job.origin, self._worker_name, started_at]
        self._put_right(keys=keys, args=[*self._lease.args(rq_job.origin), "", rq_job.id, *written])
        return True


def _is_delivery_of(rq_job: JsonJob, created_at: bytes, repeats_left: bytes, data: bytes) -> bool:
    """Bytes may differ where a client of RQ's has read the job and written it again: it compresses, and it writes times
    in one way."""
    if repeats_left != rq_job.raw_repeats_left or unpacked(data) != rq_job.data:
        return False
    written = rq_job.raw_created_at
    if created_at == written.encode(errors="replace"):
        return True
    try:
        return str_to_date(created_at) == str_to_date(written.encode())
    except ValueError:
        return False
