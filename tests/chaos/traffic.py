"""The producers of a chaos run: one enqueues the plan, one withdraws jobs, one enqueues ids again. A thread each.

All of them use a connection that loses replies. Owns the list of their deliveries. After a lost reply most of them
send the same delivery once more.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from tests.chaos.deliveries import ENDED, Delivery
from tests.chaos.enqueuer import Enqueuer
from tests.chaos.plan import Again, PlannedJob
from tests.chaos.withdrawal import Withdrawal

from stoker import Producer
from stoker_shared.errors import RedisUnavailable

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
