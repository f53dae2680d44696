"""From a claimed id to a started job, or to one that is refused with a line. Inbox thread.

Owns the count of jobs started. Whatever a stranger wrote into Redis costs that one job, never the ones beside it.
"""

import itertools
import logging
import re
import time
from collections.abc import Callable, Container
from typing import Final, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError
from rq.exceptions import NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.queue import Queue

from stoker_shared.errors import OwnershipLost, PayloadRefused, RequestError
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import DEFAULT_JOB_TIMEOUT_S
from stoker_worker.ports import ClaimedJob, Delivery
from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.json_job import JsonJob
from stoker_worker.rq_worker.lease import HOLDS, Lease

log = logging.getLogger(__name__)

_RQ_JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]+")
_OVER: Final = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}

# Still claimed by us; -1 for a job that was withdrawn since it was read.
_MAY_START = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
if not redis.call('LPOS', KEYS[3], ARGV[4]) then return 0 end
local status = redis.call('HGET', KEYS[4], 'status')
for i = 5, #ARGV do
  if status == ARGV[i] then return -1 end
end
return redis.call('EXISTS', KEYS[4]) == 1 and 1 or -1
"""
)


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
        self._claim_numbers = itertools.count()

    def start(self, queue_name: str, job_id: str) -> ClaimedJob | None:
        """``None`` when there is nothing to run behind the id, or what is there was refused.

        Raises:
            RedisError: the server went away in between; recovery finds what was begun.
        """
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
            execution = self._identity.begin(rq_job, lambda pipeline: self._check(pipeline, queue_name, job_id))
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
            request = rq_job.generation_request(callbacks=self._callbacks)
            return _claimed(handle, request, next(self._claim_numbers))
        except RequestError as error:
            log.warning("job %s refused: %s: %s", job_id, type(error).__name__, error)
            self._refuse(handle, error)
            return None

    def drop_id(self, queue_name: str, job_id: str) -> None:
        """Forget a claimed id behind which there is nothing to run."""
        key = self._intermediate_key(queue_name)
        self._connection.lrem(key, 1, job_id.encode(errors="surrogateescape"))  # type: ignore[arg-type]

    def _check(self, pipeline: Pipeline, queue_name: str, job_id: str) -> None:
        """Watch what says that the claim is ours, then look: whoever takes over from here on, or withdraws the job,
        undoes the transaction.

        Without it a worker that slept since its claim would start a job again that another has finished meanwhile, and
        a job that was canceled just now would stand as started and as canceled.
        """
        keys = [*self._lease.keys(queue_name), self._intermediate_key(queue_name), Job.key_for(job_id)]
        pipeline.watch(*keys)  # type: ignore[no-untyped-call]
        over = [status.value for status in _OVER]
        may_start: int = self._may_start(keys=keys, args=[*self._lease.args(queue_name), job_id, *over])
        if may_start < 0:
            raise NoSuchJobError
        if may_start == 0:
            raise OwnershipLost(f"job {job_id} is no longer claimed by this worker")

    def _intermediate_key(self, queue_name: str) -> str:
        return IntermediateQueue.get_intermediate_queue_key(Queue(queue_name, connection=self._connection).key)

    def _read(self, job_id: str) -> tuple[JsonJob | None, RequestError | None]:
        """The job, and why it cannot be read, if so; no job when there is none (any more)."""
        if not _RQ_JOB_ID.fullmatch(job_id):
            log.error("%r is not an id RQ allows; it is dropped", job_id)
            return None, None
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


def _claimed(handle: RqHandle, request: GenerationRequest, claim_number: int) -> ClaimedJob:
    rq_job, now = handle.job, time.time()
    timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
    return ClaimedJob(
        job_id=rq_job.id,
        queue=rq_job.origin,
        request=request,
        delivery=Delivery(rq_job.id, rq_job.raw_created_at, rq_job.repeats_left),
        attempt=rq_job.deaths + 1,
        lost_alone=rq_job.lost_alone,
        enqueued_at=rq_job.enqueued_at.timestamp() if rq_job.enqueued_at else now,
        claimed_at=now,
        claim_number=claim_number,
        deadline=time.monotonic() + timeout_s if timeout_s > 0 else None,
        handle=handle,
    )
