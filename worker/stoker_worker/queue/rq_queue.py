"""`QueuePort` in RQ's terms; `open_queue` makes it, with connection, lease and registration, on the main thread.

The fetcher decides how many jobs are claimed, `claim.py` which ones, and a claimed job ends itself (`end.py`).
`QueuePort` has the threads. No lock is held while Redis is asked.
"""

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from redis import Redis
from redis.exceptions import RedisError
from rq.job import JobStatus
from rq.queue import Queue

from stoker_shared.errors import QueueHeld, RedisUnavailable
from stoker_shared.text import mask_url
from stoker_worker.placement.placement import Placement
from stoker_worker.ports import (
    NOT_COUNTED,
    Busy,
    ClaimedJob,
    DataLoss,
    MetricsPort,
    QueuePort,
    SequenceProgress,
    Serving,
    TextSoFar,
)
from stoker_worker.queue.claim import Claimer, ClaimOrder
from stoker_worker.queue.client import (
    STANDBY_POLL_S,
    as_redis_unavailable,
    client_of,
    connect,
    hang_up,
    may_pass,
    say_once,
    shorten,
    without_password,
)
from stoker_worker.queue.depths import QueueDepths
from stoker_worker.queue.end import JobFinish, RqClaimedJob
from stoker_worker.queue.housekeeping import Housekeeping
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.lease import NO_STORE, Lease, LostData, Members, OwnStore
from stoker_worker.queue.ownership import Ownership
from stoker_worker.queue.recover import Recoverer
from stoker_worker.queue.registration import RqRegistration, new_worker_name
from stoker_worker.settings import WorkerSettings

log = logging.getLogger(__name__)


_STARTED: Final = JobStatus.STARTED.value.encode()
_LOADING: Final = SequenceProgress("loading")


class RqQueue(QueuePort):
    """See `QueuePort`."""

    def __init__(
        self,
        connection: Redis,
        *,
        registration: RqRegistration,
        lease: Lease,
        beating: Redis,
        is_at_hand: Callable[[str], bool],
        patience_s: float,
        metrics: MetricsPort,
    ) -> None:
        """
        Args:
            beating: used by the heartbeat alone, with a time limit well below the lease's lifetime.
            is_at_hand, patience_s: as in `Claimer`.
        """
        self._connection = connection
        self._registration = registration
        self._beating = beating
        self._lease = lease
        self._queues = queues = registration.queue_names()
        self._in_flight: JobsInFlight[RqClaimedJob] = registration.in_flight
        placement = Placement(connection, queues if lease.shared else (), worker_name=registration.name)
        self._members = members = Members(connection, lease, ttl_s=lease.ttl_s)
        self._ownership = Ownership(connection, lease)
        self._job_finish = ends = JobFinish(connection, registration, self._ownership, placement)
        self._streams, self._progress = ends.streams, ends.progress
        self._recoverer = Recoverer(connection, lease, members)
        self._housekeeping = Housekeeping(connection, lease, members, placement)
        claimers = {
            name: Claimer(
                connection, name, lease, placement, registration, is_at_hand=is_at_hand, patience_s=patience_s
            )
            for name in queues
        }
        self._claim_order = ClaimOrder(connection, claimers, members, ends, self._in_flight, metrics=metrics)
        self._to_announce: Serving | None = None
        self._in_doubt = False

    @as_redis_unavailable()
    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        self._claim_order.has_unread = self._claim_order.knows_all = False
        self._members.look_if_due()
        self._announce()
        if any(job.is_quarantined for job in self._in_flight.snapshot()):
            return []
        if self._in_doubt:  # the jobs that the last claim left have to be back in the queue first, or order is lost
            if not self._lease.renew():
                return []
            self.recover()
        claimed: list[RqClaimedJob] = []
        try:
            self._in_doubt = True
            self._claim_order.claim(limit, busy, claimed)
            self._in_doubt = False
            self._claim_order.look_around()
        except Exception as error:
            if not claimed:
                raise
            # Jobs that were started must be returned, or they never run. The rest is put back before the next claim.
            log.warning("a claim broke off (%s: %s)", type(error).__name__, error)
        finally:
            self._in_flight.all_started()
        for job in claimed:
            if job.run.job.is_listened_to:
                self._streams.open(job.claim_number, job.run)
        return list(claimed)

    def in_flight(self) -> tuple[ClaimedJob, ...]:
        return self._in_flight.snapshot()

    def wait_for_release(self, timeout_s: float) -> bool:
        return self._in_flight.wait_for_release(timeout_s)

    def has_unread(self) -> bool:
        return self._claim_order.has_unread

    def knows_all(self) -> bool:
        return self._claim_order.knows_all

    def waiting_agents(self) -> frozenset[str]:
        return self._claim_order.waiting_agents()

    def place_of(self, agent_id: str) -> tuple[int, int]:
        return self._claim_order.place_of(agent_id)

    @as_redis_unavailable()
    def next_agents(self, limit: int) -> tuple[str, ...]:
        self._members.look_if_due()  # only before the first claim: each claim looks
        return self._claim_order.next_agents(limit)

    @as_redis_unavailable()
    def withdrawn(self, progress: Mapping[str, SequenceProgress]) -> list[ClaimedJob]:
        jobs, runs = self._in_flight.snapshot(), []
        with self._connection.pipeline(transaction=False) as pipeline:  # two round trips for all jobs
            for job in jobs:
                self._progress.look(pipeline, job.run)
            found = pipeline.execute(raise_on_error=False)
            for job, fields in zip(jobs, found, strict=True):
                # A job whose key is no hash any more was withdrawn as well.
                status, listened_to, meta = (None,) * 3 if isinstance(fields, Exception) else fields
                runs.append(status == _STARTED)
                if status == _STARTED and listened_to is not None:
                    self._streams.open(job.claim_number, job.run)
                if status == _STARTED and meta is not None:
                    self._progress.note(pipeline, job.run, meta, progress.get(job.job_id, _LOADING))
            pipeline.execute()
        for job in jobs:
            if self._in_flight.get(job.job_id) is not job:  # released meanwhile, perhaps before its stream was opened
                self._streams.close(job.claim_number, ended=False)
        return [job for job, still_runs in zip(jobs, runs, strict=True) if self._is_withdrawn(job, still_runs)]

    def listened_to(self) -> frozenset[int]:
        return self._streams.claim_numbers

    @as_redis_unavailable()
    def tell(self, texts: Mapping[int, TextSoFar]) -> None:
        for claim_number, so_far in texts.items():
            self._streams.tell(claim_number, so_far)

    @as_redis_unavailable()
    def recover(self) -> int:
        """Put back the jobs of dead workers, and those of our claims whose reply was lost; returns how many."""
        if not self._lease.renew():
            return 0
        return self._recoverer.recover(frozenset(job.run.execution.id for job in self._in_flight.snapshot()))

    def has_dead(self) -> bool:
        return bool(self._members.dead)

    @as_redis_unavailable()
    def leave(self) -> None:
        # Until the jobs of the last worker of this name are back in the queue, the others see that worker.
        if not (self._registration.is_leaving or self._lease.former_queues):
            self._registration.is_leaving = self._lease.announce({"leaving": True})

    def announce(self, serving: Serving) -> None:
        self._registration.serving = serving  # written with the next heartbeat
        self._to_announce = serving  # told with the next claim

    @as_redis_unavailable()
    def is_empty(self) -> bool:
        if self._in_doubt:  # jobs that the last claim left are in no queue
            return False
        return all(Queue(name, connection=self._connection).count == 0 for name in self._queues)

    @as_redis_unavailable()
    def tidy(self) -> bool:
        return self._housekeeping.step()

    @as_redis_unavailable()
    def beat(self) -> bool:
        if not self._lease.renew(self._beating):
            return False
        self._registration.beat(self._beating)
        with self._beating.pipeline(transaction=False) as pipeline:  # else many jobs could take longer than the lease
            for job in self._in_flight.snapshot():
                self._registration.beat_execution(pipeline, job.run)
            pipeline.execute()
        return True

    def data_loss(self) -> DataLoss:
        return self._lease.lost_data.so_far()

    def is_suspended(self) -> bool:
        return self._claim_order.is_suspended

    def hang_up(self) -> None:
        hang_up(self._connection.connection_pool)

    def sign_off(self) -> None:
        """Give up the scheduler's locks and the lease. From here on, each call waits for a second at most: the locks
        and the lease also expire by themselves. Main thread, after all others."""
        shorten(self._connection.connection_pool, 1.0)
        try:
            self._housekeeping.scheduler.sign_off()
            self._registration.register_death()
            if self._in_doubt or self._in_flight or self._lease.former_queues:
                self._lease.release()  # the next worker of this name, or another member, puts these jobs back
            else:
                self._lease.leave()
        except RedisError as error:  # the server is gone; the lease expires by itself
            log.warning("not signed off: %s", type(error).__name__)

    def _is_withdrawn(self, job: RqClaimedJob, still_runs: bool) -> bool:
        if self._in_flight.is_to_stop(job.job_id):
            return True
        return not still_runs and self._ownership.of(job.run) != "ours"

    def _announce(self) -> None:
        """Tell the other members that this one is ready, but only after the earlier holder's jobs are put back."""
        if (serving := self._to_announce) is None or self._lease.former_queues:
            return
        if self._lease.announce({"model": serving.model, "loading": False}):
            self._to_announce = None


_LOOK_TIMEOUT_S: Final = 1.0  # a health check has to be answered soon


@dataclass(frozen=True)
class OpenQueue:
    registration: RqRegistration
    rq_queue: RqQueue
    depths: QueueDepths


@contextmanager
def open_queue(
    settings: WorkerSettings,
    redis_url: str,
    *,
    store: OwnStore = NO_STORE,
    model: str = "",
    metrics: MetricsPort = NOT_COUNTED,
) -> Iterator[OpenQueue]:
    """Join the queues, registered as an RQ worker, for as long as the context lasts. A standby waits while another
    worker has its name or its queues, or Redis is away, instead of raising.

    Args:
        model: the name of the model that the worker is going to load.

    Raises:
        RedisUnavailable: no server at the URL, it refuses us, or it is too old.
        QueueHeld: another live worker has this name, or serves a queue that the two may not share.
        StoreUnusable: the conversations of a queue are in another store.
    """
    with ExitStack() as closing:
        connection = connect(redis_url, wait=settings.standby)
        closing.callback(connection.close)
        with as_redis_unavailable():
            lease, registration = _new_member(settings, connection, store, model)
        closing.callback(registration.unsubscribe)
        _take_over(redis_url, lease, registration, standby=settings.standby)
        log.info("worker %s holds %s, as %s", registration.name, settings.queues, lease.member)
        # Two tries within the time that is left after a beat.
        beating = client_of(redis_url, timeout_s=(settings.lease_ttl_s - settings.heartbeat_s) / 3)
        closing.callback(beating.close)
        rq_queue = RqQueue(
            connection,
            registration=registration,
            lease=lease,
            beating=beating,
            is_at_hand=store.is_at_hand,
            patience_s=settings.patience_s,
            metrics=metrics,
        )
        closing.callback(rq_queue.sign_off)
        depths = QueueDepths(client_of(redis_url, timeout_s=_LOOK_TIMEOUT_S), settings.queue_names)
        closing.callback(depths.close)
        yield OpenQueue(registration, rq_queue, depths)


def usual_name() -> str:
    """The host's name, with the characters that a member's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"


def _new_member(
    settings: WorkerSettings, connection: Redis, store: OwnStore, model: str
) -> tuple[Lease, RqRegistration]:
    in_flight = JobsInFlight[RqClaimedJob]()
    member = settings.name or store.name or usual_name()
    registration = RqRegistration(
        settings.queue_names,
        connection,
        name=new_worker_name(member),
        worker_ttl_s=settings.lease_ttl_s,
        heartbeat_s=settings.heartbeat_s,
        in_flight=in_flight,
    )
    lease = Lease(
        connection,
        member,
        settings.queue_names,
        worker_name=registration.name,
        ttl_s=settings.lease_ttl_s,
        store=store.name,
        shared=store.shared,
        has_agents=store.has_agents,
        model=model,
        new_store=settings.new_store,
        lost_data=LostData(in_flight.snapshot),
    )
    return lease, registration


def _take_over(redis_url: str, lease: Lease, registration: RqRegistration, *, standby: bool) -> None:
    """Take the lease and register, both or neither: if only one is done, it is undone or expires. Raises as
    `open_queue` does."""
    said = ""
    while True:
        try:
            lease.acquire(waits=standby)
            registration.sign_on()
            return
        except QueueHeld as error:
            if not standby:
                raise
            holder = str(error).partition(";")[0]  # the rest is the time left, which changes with each look
            if holder != said:
                log.info("standing by: %s", error)
                said = holder
        except RedisError as error:
            lease.release()
            if not (standby and may_pass(error)):  # a replica, or an ACL that forbids a worker's commands
                reason = without_password(error, registration.connection)
                raise RedisUnavailable(f"{mask_url(redis_url)} refused this worker: {reason}") from None
            said = say_once(error, said)
        time.sleep(STANDBY_POLL_S)
