"""This worker as RQ's own tools see it: its hash, heartbeats, commands. Owns no job's fate."""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import worker_registration
from rq.command import parse_payload
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import (
    DEFAULT_RESULT_TTL_S,
    FIELD_ATTEMPTS,
    FIELD_DELIVERY,
    FIELD_LOST_ALONE,
    WORKER_KEY,
)
from stoker_worker.ports import Serving
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.rq_worker.json_job import JsonJob

log = logging.getLogger(__name__)

NAME_PREFIX = "stoker-"

# What is gone stays gone: a worker that fell asleep half-way would else bring back one field of what others have tidied
# up, and one that was killed just then would leave it for ever.
_WRITE_STATE = """
if redis.call('HGET', KEYS[1], 'birth') then redis.call('HSET', KEYS[1], 'state', ARGV[1]) end
"""


class RqIdentity(BaseWorker):
    """An RQ worker with many executions and no loop of its own.

    RQ's `BaseWorker` registers us, keeps our hash and executions, and holds the transactions that end a job, so that
    `rq info` and every dashboard read the truth. Its loop, its fork and its signal handlers are not used.
    """

    def __init__(
        self,
        queues: list[str],
        connection: Redis,
        *,
        name: str,
        worker_ttl_s: float,
        lease_ttl_s: int,
        heartbeat_s: float,
    ) -> None:
        """
        Args:
            worker_ttl_s: how long this worker is seen after its last heartbeat.
            lease_ttl_s: see `get_heartbeat_ttl`.
        """
        self._stopped_on = threading.local()
        super().__init__(
            queues,
            name=name,
            connection=connection,
            job_class=JsonJob,
            serializer=JSONSerializer,
            worker_ttl=max(1, int(worker_ttl_s)),  # RQ's time limit for replies follows from it
            default_result_ttl=DEFAULT_RESULT_TTL_S,
            job_monitoring_interval=max(1, int(heartbeat_s)),
            log_job_description=False,  # a plain producer's description holds its prompt
        )
        self.serving: Serving | None = None  # until the model is loaded
        self._ttl_ms = max(1, int(worker_ttl_s * 1000))
        self._process = ProcessIdentity.of_this_process()
        self._execution_lease_s = lease_ttl_s
        self._write_state = connection.register_script(_WRITE_STATE)
        self.log_result_lifespan = False
        self.log = logging.getLogger("stoker_worker.rq")
        self.on_stop_job: Callable[[str], None] = lambda job_id: None
        self.on_shutdown: Callable[[], None] = lambda: None

    def sign_on(self) -> None:
        """Be registered and listen to commands; may be repeated after Redis went away in the middle of it."""
        self.birth_date = now()
        self._state = WorkerStatus.IDLE
        self.beat(self.connection)
        if self.pubsub_thread is None:
            self.subscribe()

    def register_death(self) -> None:
        super().register_death()  # type: ignore[no-untyped-call]
        self.connection.delete(WORKER_KEY.format(name=self.name))

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds until RQ's own tools may take an execution for abandoned: far longer than our own recovery needs."""
        return self._execution_lease_s

    @property
    def _stopped_job_id(self) -> str | None:
        """RQ marks the job of this id as stopped when it writes a failure: one job for each thread that ends jobs."""
        return getattr(self._stopped_on, "job_id", None)

    @_stopped_job_id.setter
    def _stopped_job_id(self, job_id: str | None) -> None:
        self._stopped_on.job_id = job_id

    def beat(self, connection: Redis) -> None:
        """Show that this worker lives, to RQ's tools and to producers, until a little after the next beat is due.

        All of it each time: the server may have lost it, or been away for too long, and RQ's tools take workers out of
        the sets whose hash is gone just when they look.

        Args:
            connection: the heartbeat's own.
        """
        self.last_heartbeat = now()
        with connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping=self.serialize() | {"state": self.get_state()})
            pipeline.pexpire(self.key, self._ttl_ms)
            worker_registration.register(self, pipeline)
            pipeline.set(WORKER_KEY.format(name=self.name), json.dumps(self._presence()), px=self._ttl_ms)
            pipeline.execute()

    def _presence(self) -> dict[str, Any]:
        serving = asdict(self.serving) if self.serving else {"model": None, "context_tokens": None, "mode": None}
        where = {"host": self._process.host, "pid": self._process.pid}
        assert self.birth_date is not None
        return {"queues": self.queue_names(), **serving, **where, "started_at": self.birth_date.timestamp()}

    def set_state(self, state: str, pipeline: Pipeline | None = None) -> None:
        if pipeline is None:
            self._state = state
            self._write_state(keys=[self.key], args=[state])
        else:
            super().set_state(state, pipeline)
            pipeline.pexpire(self.key, self._ttl_ms)

    def increment_total_working_time(self, job_execution_time: timedelta, pipeline: Pipeline) -> None:
        """The last of the counts RQ writes into our hash when a job ends, whether the hash is there or not."""
        super().increment_total_working_time(job_execution_time, pipeline)
        pipeline.pexpire(self.key, self._ttl_ms)

    def begin(self, job: Job, check: Callable[[Pipeline], list[str]]) -> Execution:
        """RQ's `prepare_execution` and `prepare_job_execution` in one transaction: a job is started or it is not.

        The worker's own heartbeat, which RQ sends along with each job, has a thread here.

        Args:
            check: watches what the transaction depends on, and raises when there is nothing to begin; returns the
                sorted sets that the job has to leave.
        """
        was_idle = self.get_state() != WorkerStatus.BUSY
        tried: list[Execution] = []
        begun: Execution | None = None
        try:
            with self.connection.pipeline() as pipeline:
                while begun is None:
                    begun = self._try_to_begin(job, check, pipeline, tried, was_idle)
            return begun
        finally:
            for execution in tried:
                if execution is not begun:
                    self.executions.pop(execution.id, None)

    def _try_to_begin(
        self,
        job: Job,
        check: Callable[[Pipeline], list[str]],
        pipeline: Pipeline,
        tried: list[Execution],
        was_idle: bool,
    ) -> Execution | None:
        try:
            leaves = check(pipeline)
        except (NoSuchJobError, OwnershipLost):
            if (begun := self._begun(tried)) is not None:  # that is why it is not claimed any more
                return begun
            raise
        pipeline.multi()
        execution = Execution.create(job, self._execution_lease_s, pipeline=pipeline, worker_name=self.name)
        tried.append(execution)
        self.executions[execution.id] = execution  # before it is so: a stop that comes just then is for us
        if isinstance(job, JsonJob) and job.stamp:
            pipeline.hset(execution.key, FIELD_DELIVERY, job.stamp)
        job.prepare_for_execution(self.name, pipeline=pipeline)
        pipeline.persist(job.key)
        for key in leaves:
            pipeline.zrem(key, job.id)
        pipeline.lrem(Queue(job.origin, connection=self.connection).intermediate_queue_key, 1, job.id)
        if was_idle:
            self.set_state(WorkerStatus.BUSY, pipeline=pipeline)
        try:
            pipeline.execute()
            return execution
        except WatchError:  # undone by another's write; or carried out, and the reply lost
            return self._begun(tried)

    def _begun(self, tried: list[Execution]) -> Execution | None:
        """The try that was carried out after all. One that comes to the server later than this look undoes itself: it
        watches what the next try, or whoever puts the job back, writes."""
        return next((execution for execution in tried if self.connection.exists(execution.key)), None)

    def cleanup_execution(self, job: Job, pipeline: Pipeline, execution: Execution | None = None) -> None:
        """What was counted belongs to this run: a requeue by an operator, or RQ's Repeat, begins anew."""
        if isinstance(job, JsonJob):
            job.check_once(pipeline)
            if job.write_note is not None:
                job.write_note(pipeline)
        pipeline.hdel(job.key, FIELD_ATTEMPTS, FIELD_LOST_ALONE)
        super().cleanup_execution(job, pipeline, execution)

    def _enqueue_dependents_safely(self, queue: Queue, job: Job) -> None:
        """Nothing, and no slot released either: RQ does it after a failure unless it fails; the aftermath does it."""

    def _release_slot_safely(self, job: Job) -> None: ...

    def handle_payload(self, message: Any) -> None:
        """A command from RQ's pubsub thread. Stock handlers know one current job; here there are many."""
        try:
            payload = parse_payload(message)
            command = payload.get("command")
        except Exception as error:  # anybody may publish anything
            log.warning("command ignored: %s", type(error).__name__)
            return
        if command == "shutdown":
            self.on_shutdown()
        elif command == "stop-job":
            self.on_stop_job(str(payload.get("job_id", "")))
        elif command == "stop-execution":
            execution: Execution | None = self.executions.get(str(payload.get("execution_id", "")))
            if execution is not None:
                self.on_stop_job(execution.job_id)
        else:
            log.warning("command ignored: %s", command)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """RQ's own lets every error but a lost connection end the thread, and with it all commands."""
        log.warning("no commands for a moment: %s", type(exc).__name__)
        time.sleep(1.0)

    def settle_state(self) -> None:
        """Say `idle` when nothing runs: RQ sets `busy` with each execution and `idle` only in its own loop."""
        wanted = "busy" if self.executions else "idle"
        if self.get_state() != wanted:
            self.set_state(wanted)
