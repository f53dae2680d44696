"""This worker as RQ's own tools see it: its hash, its heartbeats, the commands sent to it.

Owns the registration and the thread of RQ's commands. Main thread; the heartbeat writes through it, finishers count.
"""

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, Final, Literal

from redis import Redis
from rq import worker_registration
from rq.command import parse_payload
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from stoker_shared.wire import WORKER_KEY
from stoker_worker.periodic import Periodic
from stoker_worker.ports import Serving
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.queue.client import lua, shut_down
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.json_job import JobRun, JsonJob

log = logging.getLogger(__name__)

NAME_PREFIX = "stoker-"
_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
EXECUTION_TTL_S: Final = 7 * 86_400
"""RQ's own tools leave a started job alone for so long: longer than a Mac sleeps. Recovery does not wait for it."""

_PING_S: Final = 30
"""RQ's thread looks each minute, and tries the connection for commands if it was silent for so long. One that died
while this machine slept would look alive for hours."""

_LAST_WAIT_S: Final = 2.0  # longer than a connection attempt that `shut_down` has shortened


def new_worker_name(member: str) -> str:
    """A name for an RQ worker that no other process has had."""
    return f"{NAME_PREFIX}{member}-{secrets.token_hex(4)}"


def member_of(worker_name: str) -> str:
    """The member of a name from `new_worker_name`."""
    return _SUFFIX.sub("", worker_name.removeprefix(NAME_PREFIX))


class RqRegistration(BaseWorker):
    """An RQ worker with many executions. RQ's `BaseWorker` registers it and writes its hash, so that `rq info` and
    every dashboard show the truth. `BaseWorker`'s loop, fork, signal handlers and `executions` are not used."""

    pubsub_thread: Any  # RQ's types know it as `None` only

    def __init__(
        self,
        queues: list[str],
        connection: Redis,
        *,
        name: str,
        worker_ttl_s: float,
        heartbeat_s: float,
        in_flight: JobsInFlight[Any],
    ) -> None:
        """`worker_ttl_s`: how long this worker is shown after its last heartbeat."""
        self._is_unsubscribing = threading.Event()
        self.in_flight = in_flight
        super().__init__(
            queues,
            name=name,
            connection=connection,
            job_class=JsonJob,
            serializer=JSONSerializer,
            worker_ttl=max(1, int(worker_ttl_s)),  # RQ's time limit for replies follows from it
            job_monitoring_interval=max(1, int(heartbeat_s)),
            log_job_description=False,  # a plain producer's description holds its prompt
        )
        self.serving: Serving | None = None  # until the model is loaded
        self.figures: Callable[[], Mapping[str, Any]] = dict  # no I/O: it runs in the heartbeat
        self._ttl_ms = max(1, int(worker_ttl_s * 1000))
        self._process = ProcessIdentity.of_this_process()
        self._beat_script = connection.register_script(lua("beat"))
        self.log = logging.getLogger("stoker_worker.rq")
        self.on_shutdown: Callable[[], None] | None = None
        self._counting = threading.Lock()
        self._says_ignored = Periodic(60.0)
        self.is_leaving = False

    def sign_on(self) -> None:
        """Register and listen to commands; may be repeated if Redis goes away meanwhile."""
        self.birth_date = now()
        self._state = WorkerStatus.IDLE
        self.beat(self.connection)
        if self.pubsub_thread is None:
            self.subscribe()

    def subscribe(self) -> None:
        super().subscribe()  # type: ignore[no-untyped-call]
        self.pubsub_thread.name = "commands"
        self.pubsub_thread.pubsub.connection.health_check_interval = _PING_S

    def unsubscribe(self) -> None:
        """End the commands thread. RQ's own method leaves it running if the server does not reply."""
        if self.pubsub_thread is None or self.pubsub is None:
            return
        self._is_unsubscribing.set()
        self.pubsub_thread.stop()
        until = time.monotonic() + _LAST_WAIT_S
        while self.pubsub_thread.is_alive() and time.monotonic() < until:
            if (connection := self.pubsub.connection) is not None:
                shut_down(connection)
            self.pubsub_thread.join(0.1)  # then once more: it may have been connecting anew

    def register_death(self) -> None:
        self.connection.hset(self.key, mapping=self.serialize() | {"state": "idle"} | self._counts())
        super().register_death()  # type: ignore[no-untyped-call]
        self.connection.delete(WORKER_KEY.format(name=self.name))

    def beat(self, connection: Redis) -> None:
        """Show RQ's tools and producers that this worker lives. Everything is written each time: the server may have
        lost it, and RQ's tools remove a worker whose hash is missing from their sets. `connection`: the heartbeat's."""
        self.last_heartbeat = now()
        self._state = WorkerStatus.BUSY if self.in_flight else WorkerStatus.IDLE
        with connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping=self.serialize() | {"state": self.get_state()} | self._counts())
            pipeline.pexpire(self.key, self._ttl_ms)
            worker_registration.register(self, pipeline)
            pipeline.set(WORKER_KEY.format(name=self.name), json.dumps(self._presence()), px=self._ttl_ms)
            pipeline.execute()

    def beat_execution(self, connection: Redis, run: JobRun) -> None:
        """RQ's `Execution.heartbeat`, if the execution still exists. `connection`: as for `beat`."""
        execution, moment = run.execution, now()
        execution.last_heartbeat = run.job.last_heartbeat = moment
        args: list[str | int | float] = [execution.id, execution.composite_key, EXECUTION_TTL_S]
        self._beat_script(keys=run.keys, args=[*args, moment.timestamp(), utcformat(moment)], client=connection)

    def _presence(self) -> dict[str, Any]:
        serving = asdict(self.serving) if self.serving else dict.fromkeys(field.name for field in fields(Serving))
        where = {"host": self._process.host, "pid": self._process.pid}
        assert self.birth_date is not None
        started_at = self.birth_date.timestamp()
        which = {"member": member_of(self.name), "queues": self.queue_names(), "leaving": self.is_leaving}
        rest = {"started_at": started_at, "now": {**self.figures()}}
        return {**which, **serving, **where, **rest}

    def count_end(self, job: Job, how: Literal["finished", "failed"]) -> None:
        """Count a run that has ended; the next beat shows it. Any thread."""
        with self._counting:
            if how == "finished":
                self.successful_job_count += 1
            else:
                self.failed_job_count += 1
            if job.started_at and job.ended_at:
                self.total_working_time += (job.ended_at - job.started_at).total_seconds()

    def _counts(self) -> dict[str, Any]:
        names = ("successful_job_count", "failed_job_count", "total_working_time")
        with self._counting:
            return {name: count for name in names if (count := getattr(self, name))}

    def handle_payload(self, message: Any) -> None:
        """Handle a command, on RQ's pubsub thread. RQ's own handlers know one current job; here there are many."""
        try:
            payload = parse_payload(message)
            command = payload.get("command")
        except Exception as error:  # any client may publish anything
            payload, command = {}, type(error).__name__
        if command == "shutdown" and self.on_shutdown is not None:
            self.on_shutdown()
        elif command in ("stop-job", "stop-execution"):  # a job has one execution at a time
            self.in_flight.ask_to_stop(str(payload.get("job_id", "")))
        elif self._says_ignored.is_due():  # any client may publish as much as it likes
            log.warning("command ignored: %s; for a minute, others are not logged", repr(command)[:100])

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """RQ's own handler lets every error but a lost connection end the thread, and with it all commands."""
        if self._is_unsubscribing.is_set():
            pubsub_thread.stop()  # again: the thread has overwritten a stop that came before it began
            return
        log.debug("no commands for a moment: %s", type(exc).__name__)  # the log has the outage from other threads
        self._is_unsubscribing.wait(1.0)
