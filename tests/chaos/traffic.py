"""The producers of a chaos run: one enqueues the plan, one withdraws jobs, one enqueues ids again. A thread each.

All of them use a connection that loses replies. Owns the list of their deliveries. After a lost reply most of them
send the same delivery once more.
"""

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import Queue
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Dependency, Job
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat, utcparse
from tests.chaos.plan import Again, PlannedJob

from stoker import Producer
from stoker_shared.errors import JobNotFound, RedisUnavailable
from stoker_shared.wire import TASK_PATH

UNKNOWN = "unknown"
ENDED = {"finished", "failed", "stopped", "canceled"}


@dataclass
class Delivery:
    """One request under one id with one creation time, sent once or more often.

    Attributes:
        created_at: the value in the job's hash; ``None`` where the producer chose it.
        met: for each time it was sent, the state of the job that had the id; ``None``: the id was free.
        is_acknowledged: one of the sends was answered. Otherwise the job may exist or not.
        is_settled: it will not be sent again.
    """

    job: PlannedJob
    created_at: str | None = None
    met: list[str | None] = field(default_factory=list)
    is_acknowledged: bool = False
    is_settled: bool = False

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def most_ends(self) -> int:
        """How many ends it may have: each send after an end adds one, except sends by the producer."""
        return 1 if self.job.is_submitted else 1 + sum(state in {*ENDED, UNKNOWN} for state in self.met[1:])


class Enqueuer:
    def __init__(self, connection: Redis, producer: Producer) -> None:
        self._connection = connection
        self._producer = producer

    def send(self, delivery: Delivery, *, is_new: bool) -> None:
        """
        Args:
            is_new: no job has this id yet.
        """
        delivery.met.append(None if is_new and not delivery.met else UNKNOWN)  # until the answer comes
        if delivery.job.is_submitted:
            self._submit(delivery)
        elif delivery.job.delay_s is not None:
            self._schedule(delivery)
        elif delivery.job.parents:
            self._queue(delivery.job).enqueue_job(self._rq_job(delivery))
        else:
            self._enqueue(delivery)
        delivery.is_acknowledged = True

    def _submit(self, delivery: Delivery) -> None:
        job = delivery.job
        timeout_s, at_front = job.options["job_timeout"], bool(job.options.get("at_front"))
        if job.index % 2 and not at_front:
            self._producer.submit_many([job.request], queue=job.queue, job_timeout_s=timeout_s, job_ids=[job.job_id])
        else:
            options = {"queue": job.queue, "job_timeout_s": timeout_s, "at_front": at_front}
            self._producer.submit(**job.request, **options, job_id=job.job_id)

    def _schedule(self, delivery: Delivery) -> None:
        job = delivery.job
        assert job.delay_s is not None
        self._queue(job).schedule_job(self._rq_job(delivery), now() + datetime.timedelta(seconds=job.delay_s))

    def _enqueue(self, delivery: Delivery) -> None:
        """Enqueue in one transaction that also reads the state of the job that has the id."""
        rq_job = self._rq_job(delivery)
        with self._connection.pipeline() as pipeline:
            pipeline.multi()
            pipeline.hget(rq_job.key, "status")
            at_front = bool(delivery.job.options.get("at_front"))
            self._queue(delivery.job).enqueue_job(rq_job, pipeline=pipeline, at_front=at_front)
            [met, *_] = pipeline.execute()
        delivery.met[-1] = met and met.decode()

    def _rq_job(self, delivery: Delivery) -> Job:
        """A new object for each send: RQ writes into the job it enqueues."""
        job = delivery.job
        options = {name: value for name, value in job.options.items() if name not in {"at_front", "job_timeout"}}
        if job.parents:
            options["depends_on"] = Dependency(jobs=list(job.parents), allow_failure=job.allow_failure)
        rq_job = self._queue(job).create_job(
            TASK_PATH,
            kwargs={"request": job.request},
            job_id=job.job_id,
            description="chaos",
            timeout=job.options["job_timeout"],
            **options,
        )
        if delivery.created_at is None:
            delivery.created_at = utcformat(rq_job.created_at)
        else:
            rq_job.created_at = utcparse(delivery.created_at)
        return rq_job

    def _queue(self, job: PlannedJob) -> Queue:
        return Queue(job.queue, connection=self._connection, serializer=JSONSerializer)


class Withdrawal:
    def __init__(self, connection: Redis, producer: Producer) -> None:
        self._connection = connection
        self._producer = producer

    def has_come_to_its_end(self, job: PlannedJob) -> bool:
        """Otherwise withdraw it, if it is time; a stop command may be lost together with its worker."""
        try:
            rq_job = Job.fetch(job.job_id, self._connection, JSONSerializer)
            state = rq_job.get_status(refresh=False)
            if state in ENDED:
                return True
            if job.withdraw_when != "started" or state == "started":
                self._withdraw(job, rq_job, is_started=state == "started")
        except (NoSuchJobError, JobNotFound):
            return True
        except (InvalidJobOperation, RedisError, RedisUnavailable, OSError):
            pass
        return False

    def _withdraw(self, job: PlannedJob, rq_job: Job, *, is_started: bool) -> None:
        match job.withdraw:
            case "ticket":
                self._producer.ticket(job.job_id).cancel()
            case "cancel":
                rq_job.cancel()
            case "delete":
                rq_job.delete()
            case "stop" if is_started and rq_job.worker_name:
                send_stop_job_command(self._connection, job.job_id, serializer=JSONSerializer)


AWAY = (RedisError, RedisUnavailable, OSError)
_SENDS_AGAIN = 0.7  # the share of sends repeated after a lost reply


class Traffic:
    """Attributes:
    deliveries: everything sent so far, in order.
    pause: held while Redis must not change.
    """

    def __init__(self, redis_url: str, jobs: Sequence[PlannedJob], random: Random, lasts_s: float) -> None:
        self._url = redis_url
        self._jobs = jobs
        self._random = random
        self._lasts_s = lasts_s
        self.deliveries: list[Delivery] = []
        self.errors: list[str] = []
        self.pause = threading.Lock()
        self._leave = threading.Event()
        people = (self._enqueue, self._withdraw, self._enqueue_again)
        self._threads = [threading.Thread(target=self._safely, args=(run,)) for run in people]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join()

    @property
    def is_over(self) -> bool:
        """Whether everything is enqueued, and every withdrawal is done."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def is_enqueued(self) -> bool:
        """Whether everything is enqueued at least once."""
        return not self._threads[0].is_alive()

    def _safely(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(f"{run.__name__}: {type(error).__name__}: {error}")

    def _connect(self) -> Redis:
        """A connection that never repeats a request by itself."""
        return Redis.from_url(self._url, retry=Retry(NoBackoff(), 0), socket_timeout=10)

    def _enqueue(self) -> None:
        connection = self._connect()
        enqueuer = Enqueuer(connection, Producer(self._url))
        mean_s = self._lasts_s / len(self._jobs)
        at = 0
        while at < len(self._jobs) and not self._leave.is_set():
            burst = self._random.randrange(1, 8)
            for job in self._jobs[at : at + burst]:
                self._send(connection, enqueuer, Delivery(job), is_new=True)
            at += burst
            time.sleep(mean_s * burst * self._random.uniform(0.2, 1.2))

    def _send(self, connection: Redis, enqueuer: Enqueuer, delivery: Delivery, *, is_new: bool) -> None:
        if not any(sent is delivery for sent in self.deliveries):
            self.deliveries.append(delivery)
        delivery.is_settled = False
        while not self._leave.is_set():
            self._wait_for_server(connection)
            with self.pause, suppress(*AWAY):
                enqueuer.send(delivery, is_new=is_new)
                break
            if self._random.random() > _SENDS_AGAIN:
                break
        delivery.is_settled = True

    def _wait_for_server(self, connection: Redis) -> None:
        while not self._leave.is_set():
            with suppress(*AWAY):
                connection.ping()
                return
            time.sleep(0.02)

    def _withdraw(self) -> None:
        connection = self._connect()
        withdrawal = Withdrawal(connection, Producer(self._url))
        done: set[str] = set()
        while not self._leave.is_set():
            over = self.is_enqueued
            known = [delivery.job for delivery in list(self.deliveries) if delivery.is_settled]
            waiting = [job for job in known if job.withdraw and job.job_id not in done]
            for job in waiting:
                with self.pause:
                    if withdrawal.has_come_to_its_end(job):
                        done.add(job.job_id)
            if over and not waiting:
                return
            time.sleep(0.03)

    def _enqueue_again(self) -> None:
        connection = self._connect()
        enqueuer = Enqueuer(connection, Producer(self._url))
        done: set[str] = set()
        while not self._leave.is_set():
            over = self.is_enqueued
            firsts = [delivery for delivery in list(self.deliveries) if delivery.job.again and delivery.is_settled]
            waiting = [first for first in firsts if first.job.name not in done]
            for first in waiting:
                again = first.job.again
                assert again is not None
                with suppress(*AWAY):
                    status = connection.hget(f"rq:job:{first.job_id}", "status")
                    if _is_time(again, status.decode() if status else None):
                        done.add(first.job.name)
                        self._send(connection, enqueuer, _second(first, again), is_new=False)
            if over and not waiting:
                return
            time.sleep(0.01)


def _is_time(again: Again, status: str | None) -> bool:
    """Also if that time has passed, or can never come: the id may be free."""
    return status == again.when or status in ENDED or status is None


def _second(first: Delivery, again: Again) -> Delivery:
    if again.same_moment and again.job.name == first.job.name:
        return first
    created_at = first.created_at if again.same_moment else None
    return Delivery(again.job, created_at)
