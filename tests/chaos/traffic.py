"""The two people who use the queue during a chaos run: one enqueues the plan, one withdraws jobs. A thread each."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

from redis.exceptions import RedisError, WatchError
from rq import Queue
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.chaos.plan import PlannedJob
from tests.chaos.restarting_server import RestartingServer

from stoker import Producer
from stoker_shared.errors import JobNotFound, RedisUnavailable
from stoker_shared.wire import TASK_PATH

AWAY = (RedisError, RedisUnavailable, OSError)
ENDED = {"finished", "failed", "stopped", "canceled"}


class Traffic:
    """Attributes:
    acknowledged: jobs whose enqueue returned, in that order.
    in_doubt: jobs whose enqueue did not: the server went away. They may be there or not.
    pause: held by whoever wants Redis to stand still.
    """

    def __init__(self, server: RestartingServer, jobs: Sequence[PlannedJob], random: Random, lasts_s: float) -> None:
        self._server = server
        self._jobs = jobs
        self._random = random
        self._lasts_s = lasts_s
        self.acknowledged: list[PlannedJob] = []
        self.in_doubt: list[PlannedJob] = []
        self.errors: list[str] = []
        self.pause = threading.Lock()
        self._leave = threading.Event()
        self._threads = [threading.Thread(target=self._safely, args=(run,)) for run in (self._enqueue, self._withdraw)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join()

    @property
    def is_over(self) -> bool:
        """Everything is enqueued, and what was to be withdrawn is."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def is_enqueued(self) -> bool:
        return not self._threads[0].is_alive()

    def _safely(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(f"{run.__name__}: {type(error).__name__}: {error}")

    def _enqueue(self) -> None:
        connection = self._server.connection()
        mean_s = self._lasts_s / len(self._jobs)
        at = 0
        while at < len(self._jobs) and not self._leave.is_set():
            burst = self._random.randrange(1, 8)
            for job in self._jobs[at : at + burst]:
                self._wait_for_server(connection)
                with self.pause:
                    try:
                        self._enqueue_one(connection, job)
                    except AWAY:
                        self.in_doubt.append(job)
                    else:
                        self.acknowledged.append(job)
            at += burst
            time.sleep(mean_s * burst * self._random.uniform(0.2, 1.2))

    def _enqueue_one(self, connection, job: PlannedJob) -> None:
        queue = Queue(job.queue, connection=connection, serializer=JSONSerializer)
        options = {**job.options, "job_id": job.job_id, "description": "chaos"}
        if job.delay_s is None:
            queue.enqueue(TASK_PATH, request=job.request, **options)
        else:
            import datetime

            queue.enqueue_in(datetime.timedelta(seconds=job.delay_s), TASK_PATH, request=job.request, **options)

    def _wait_for_server(self, connection) -> None:
        while not self._leave.is_set():
            with suppress(*AWAY):
                connection.ping()
                return
            time.sleep(0.02)

    def _withdraw(self) -> None:
        connection = self._server.connection()
        producer = Producer(connection)
        done: set[str] = set()
        while not self._leave.is_set():
            over = self.is_enqueued
            known = [*self.acknowledged, *self.in_doubt]
            waiting = [job for job in known if job.withdraw and job.job_id not in done]
            for job in waiting:
                try:
                    with self.pause:
                        if self._withdraw_one(connection, producer, job):
                            done.add(job.job_id)
                except (NoSuchJobError, JobNotFound):
                    done.add(job.job_id)
                except (InvalidJobOperation, WatchError, *AWAY):
                    pass
            if over and not waiting:
                return
            time.sleep(0.03)

    def _withdraw_one(self, connection, producer: Producer, job: PlannedJob) -> bool:
        """Whether nothing is left to do. A stop command may be lost with the worker it was sent to."""
        rq_job = Job.fetch(job.job_id, connection, JSONSerializer)
        state = rq_job.get_status(refresh=False)
        if state in ENDED:
            return True
        if job.withdraw_when == "started" and state != "started":
            return False
        match job.withdraw:
            case "ticket":
                producer.cancel(job.job_id)
            case "cancel":
                rq_job.cancel()
            case "delete":
                rq_job.delete()
            case "stop" if state == "started" and rq_job.worker_name:
                send_stop_job_command(connection, job.job_id, serializer=JSONSerializer)
        return False
