"""From a claimed id to a started job, or to a job that is refused with a line. Fetcher thread.

Numbers the claims. Malformed data in Redis fails only its own job.
"""

import itertools
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final, cast

from redis import Redis
from redis.exceptions import RedisError
from rq.exceptions import NoSuchJobError
from rq.executions import Execution

from stoker_shared.agent_request import AgentRequest
from stoker_shared.error_line import message_line
from stoker_shared.errors import OwnershipLost, PayloadRefused, RequestError, StokerError
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import CLAIMED_KEY, DEFAULT_JOB_TIMEOUT_S
from stoker_worker.events.job_log import log_failure
from stoker_worker.placement.placement import Writes
from stoker_worker.ports import Delivery
from stoker_worker.queue.claimed_job import QueueParts, RqClaimedJob
from stoker_worker.queue.foreign_ids import raw
from stoker_worker.queue.json_job import JobRun, JsonJob, is_rqs
from stoker_worker.queue.last_resort import FOREIGN_ID, is_the_jobs
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.start_transaction import OVER, EnqueuedAnew, RunsElsewhere, StartTransaction
from stoker_worker.queue.waiting_job import Granted

log = logging.getLogger(__name__)


_READS: Final = 10


class JobStart:
    """Reads claimed jobs, starts them in RQ's terms, and numbers them."""

    def __init__(self, connection: Redis, registration: RqRegistration, lease: Lease, parts: QueueParts) -> None:
        """
        Args:
            parts: given to each claimed job; a job that cannot be run is ended with them.
        """
        self._parts = parts
        self._connection = connection
        self._lease = lease
        self._transaction = StartTransaction(connection, registration, lease)
        self._last_resort = parts.job_finish.last_resort
        self._claim_numbers = itertools.count()

    def start(self, queue_name: str, granted: Granted) -> RqClaimedJob | None:
        """``None`` if there is no job of this id that can run, or if it was refused.

        Raises:
            RunsElsewhere: its id has to wait; it is still among the claimed ones.
            RedisError: the server went away meanwhile; recovery finds a job that was begun.
        """
        job_id = granted.job_id
        if not is_rqs(job_id):
            self._give_up(queue_name, job_id, FOREIGN_ID)
            return None
        for _ in range(_READS):
            try:
                return self._start(queue_name, granted)
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

    def _start(self, queue_name: str, granted: Granted) -> RqClaimedJob | None:
        job_id = granted.job_id
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
            return self._claimed(run, rq_job.read_request(callbacks=self._parts.callbacks), granted)
        except RequestError as error:
            log_failure(job_id, error, queue=queue_name)
            self._refuse(run, error)
        except Exception as error:
            self._give_up(queue_name, job_id, error, execution)
        return None

    def _claimed(self, run: JobRun, request: GenerationRequest | AgentRequest, granted: Granted) -> RqClaimedJob:
        if isinstance(request, GenerationRequest) and request.route:
            if request.access == "write":
                raise PayloadRefused("a job with a route writes no agent's memory: set 'cache' to 'read' or 'off'")
            if run.job.repeats_left:
                raise PayloadRefused("a job with a route ends in another queue than it began, so it cannot be repeated")
        rq_job, now = run.job, time.time()
        timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
        last = granted.last
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
            tried=rq_job.tried,
            last=last,
            was_saving=rq_job.was_saving,
            run=replace(run, writes=Writes.of(request, last.number if last else 0)),
            parts=self._parts,
        )

    def _refuse(self, run: JobRun, error: StokerError) -> None:
        for tries_left in (2, 1, 0):  # a refused job is in no table: nobody else tries again after a lost connection
            try:
                self._parts.job_finish.fail(run, error)
                break
            except OwnershipLost:  # it was withdrawn just now
                self._parts.ownership.let_go(run)
                return
            except RedisError:
                if not tries_left:
                    raise
        self._parts.callbacks.failed(run.job, error)

    def drop_id(self, queue_name: str, job_id: str) -> None:
        """Forget a claimed id that names no job to run."""
        key = CLAIMED_KEY.format(queue=queue_name, member=self._lease.member)
        self._connection.lrem(key, 1, raw(job_id))  # type: ignore[arg-type]

    def _read(self, job_id: str) -> JsonJob | None:
        try:
            return cast(JsonJob, JsonJob.fetch(job_id, connection=self._connection))
        except NoSuchJobError:  # its time to live in the queue has passed
            return None
