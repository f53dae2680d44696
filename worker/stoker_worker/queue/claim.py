"""Claims jobs and starts them: a quarantined job alone, otherwise as many as there is room. Fetcher thread.

A `Claimer` takes from one queue the jobs that `FairQueue` chooses, as far as their agents are free. It owns for how
long jobs have been left to the workers that have their agents' caches. `JobStart` makes a claimed id a started job, or
a job that is refused with a line; malformed data in Redis fails only its own job. It numbers the claims. `ClaimOrder`
goes through the queues. It owns how long a quarantined job has waited, and which ids were enqueued again while their
job runs, here or elsewhere: workers tell their jobs apart by id, so the second delivery of an id cannot start before
the first has left.
"""

import itertools
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Final, NamedTuple, cast
from uuid import uuid4

from redis import Redis
from redis.exceptions import RedisError
from rq.exceptions import NoSuchJobError
from rq.executions import Execution, ExecutionRegistry
from rq.job import JobStatus
from rq.queue import Queue
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import utcformat

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import OwnershipLost, PayloadRefused, RequestError, StokerError
from stoker_shared.request import GenerationRequest
from stoker_shared.text import message_line
from stoker_shared.wire import (
    BATCH_KEY,
    CLAIMED_KEY,
    COUNTS_KEY,
    DEFAULT_FAILURE_TTL_S,
    DEFAULT_JOB_TIMEOUT_S,
    FIELD_DELIVERY,
    MEMBERS_KEY,
    TAKEN_KEY,
)
from stoker_worker.events import log_failure
from stoker_worker.periodic import Periodic
from stoker_worker.placement.placement import FRAGMENT, Placement, Writes, as_field
from stoker_worker.ports import Busy, Delivery, LastVersion, MemoryUse
from stoker_worker.queue.cascade import model_of
from stoker_worker.queue.client import lua
from stoker_worker.queue.end import FOREIGN_ID, Claim, JobFinish, Requeue, RqClaimedJob, is_the_jobs
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.json_job import JobRun, JsonJob, is_rqs, raw
from stoker_worker.queue.lease import Lease, Members
from stoker_worker.queue.registration import RqRegistration, member_of
from stoker_worker.queue.waiting import Aside, QueueView

log = logging.getLogger(__name__)

_CLAIM_TRIES: Final = 8  # in one claim, while jobs turn out not to be ours to claim
_TRIED_AT_ONCE: Final = 32  # from the second try on: many may be left to the same worker
_MOST_PASSED: Final = 10_000
_HELD_S: Final = 0.5
"""How long a line is aside while a job of its agent is in flight elsewhere, before the next try."""

_QUARANTINED_WAITS_S: Final = 5.0
"""How long other jobs still start while a quarantined job waits. After that nothing is claimed until it has run."""

_LOOK_AGAIN_S: Final = 1.0
"""Until an id is claimed again whose earlier delivery ran at another worker."""

_LOOK_AROUND_S: Final = 0.5
_REST_SHARE: Final = 20.0
"""Pause this many times as long as a scan took, which passes all jobs that are left to other workers."""

_READS: Final = 10
_WAITS: Final = (ScheduledJobRegistry, DeferredJobRegistry)
_CANCELED: Final = (CanceledJobRegistry,)
_REGISTRIES: Final = (*_WAITS, ReadyJobRegistry, FinishedJobRegistry, FailedJobRegistry, *_CANCELED)
OVER: Final = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}


class Granted(NamedTuple):
    """A job that was claimed.

    Attributes:
        use: how it uses memory, as far as was known when it was claimed.
        last: as in `ClaimedJob`.
    """

    job_id: str
    use: MemoryUse
    last: LastVersion | None = None


class Claimer:
    """The waiting jobs of one queue.

    A job that was in flight when its worker was lost is quarantined. It is claimed alone, so that a job which kills its
    workers takes no other jobs down with it a second time.
    """

    def __init__(
        self,
        connection: Redis,
        queue_name: str,
        lease: Lease,
        placement: Placement,
        *,
        is_at_hand: Callable[[str], bool],
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            is_at_hand: as in `FairQueue`.
            patience_s: how long a job is left to the worker that has its agent's cache, once it was passed here.
        """
        self._connection = connection
        self._lease = lease
        self._placement = placement
        self._patience_s = patience_s
        self._clock = clock
        self._queue_name = queue_name
        self._key = Queue(queue_name, connection=connection).key
        claimed = CLAIMED_KEY.format(queue=queue_name, member=lease.member)
        news = [TAKEN_KEY.format(queue=queue_name), COUNTS_KEY.format(queue=queue_name)]
        agents = [*placement.held.values(), *placement.last.values()]
        self._claim_keys = [self._key, claimed, lease.keys[0], MEMBERS_KEY, *news, WORKERS_SUSPENDED, *agents]
        self._claim = connection.register_script(FRAGMENT + lua("claim"))
        self._view = QueueView(connection, queue_name, is_at_hand)
        self.waiting = self._view.waiting
        self._passed_at: dict[str, float] = {}
        self._idle_at = -inf  # when a claim left a place free
        self._has_untried = False

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """As `QueueView.read_ahead`."""
        self._has_untried = False
        self._view.read_ahead(limit, busy)

    @property
    def is_suspended(self) -> bool:
        """As `QueueView.is_suspended`."""
        return self._view.is_suspended

    @property
    def has_unread(self) -> bool:
        """As `QueueView.has_unread`; also if the last claim found only jobs so far that are not ours to claim."""
        return self._view.has_unread or self._has_untried

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that were read and may be claimed here; the same object until they change."""
        return self.waiting.lines.agents()

    def claim(self, limit: int, busy: Busy) -> list[Granted]:
        """Take up to `limit` jobs out of the queue, which may run beside what is busy, none of them quarantined.

        Nothing is claimed if the lease has another holder, or an operator has suspended the workers.
        """
        granted: list[Granted] = []
        for n in range(_CLAIM_TRIES):
            left = limit - len(granted)
            chosen = self.waiting.choose(max(left, _TRIED_AT_ONCE) if n and left else left, busy)
            found, has_put_aside = self._take(chosen, left)
            granted += found
            if not has_put_aside:
                break
            busy = busy.beside(one.use for one in found)
        else:
            self._has_untried = True
        if len(granted) < limit:
            self._idle_at = self._clock()
        return granted

    def claim_quarantined(self, busy: Busy) -> list[Granted]:
        """As `claim`, for the oldest quarantined job. The caller sees to it that the job runs alone."""
        job_id = self.next_quarantined(busy)
        return [] if job_id is None else self._take([job_id], 1)[0]

    def next_quarantined(self, busy: Busy) -> str | None:
        """The oldest quarantined job that can be claimed, of those the server still has in the queue."""
        while (job_id := self.waiting.next_quarantined(busy)) is not None:
            if self._connection.lpos(self._key, raw(job_id)) is not None:  # type: ignore[arg-type]
                return job_id
            self.waiting.discard(job_id)
        return None

    def correct(self, job_id: str, use: MemoryUse, *, quarantined: bool) -> None:
        """As `QueueView.correct`."""
        self._view.correct(job_id, use, quarantined=quarantined)

    def look_around(self, ready: Container[str]) -> None:
        """Take back the lines that need not wait any more.

        Args:
            ready: the other members to which lines may be left.
        """
        lines, now, back = self.waiting.lines, self._clock(), []
        if len(self._passed_at) > _MOST_PASSED + len(self.waiting):  # a job that goes back has waited already
            self._passed_at = {job_id: at for job_id, at in self._passed_at.items() if job_id in self.waiting}
        for agent_id, why in lines.aside.items():
            head = lines.first_of(agent_id)
            if now >= why.until or (why.maker and why.maker not in ready):
                back.append(agent_id)
            elif why.maker and head is not None and head.job_id != why.job_id:  # the maker has taken that one
                lines.aside[agent_id] = self._passed(head.job_id, why.maker)
        lines.take_back(back)

    def _passed(self, job_id: str, maker: str) -> Aside:
        """Its patience begins when the job could have been claimed here first."""
        return Aside(job_id, maker, self._passed_at.setdefault(job_id, self._clock()) + self._patience_s)

    def _is_impatient(self, job_id: str) -> bool:
        """A backlog uses up nobody's patience: it begins anew if this worker has had other work all the time."""
        passed_at = self._passed_at.get(job_id, inf)
        is_over = self._clock() - passed_at >= self._patience_s or not self._patience_s
        if is_over and self._patience_s and self._idle_at < passed_at:
            del self._passed_at[job_id]
            return False
        return is_over

    def _take(self, chosen: Sequence[str], limit: int) -> tuple[list[Granted], bool]:
        """Claim the first `limit` of these that are ours to claim; and whether any was put aside."""
        if not chosen:
            return [], False
        args: list[str | bytes | int] = [self._lease.value, self._lease.member, self._queue_name, limit]
        uses = [self.waiting.use_of(job_id) for job_id in chosen]
        for job_id, use in zip(chosen, uses, strict=True):
            word = b""
            if use.agent_id is not None:
                mode = b"w" if use.access == "write" else b"r"
                word = mode + (b"1" if self._is_impatient(job_id) else b"0") + as_field(use.agent_id)
            args += [-1 if self.waiting.is_nearer_to_the_end(job_id) else 1, raw(job_id), word]
        found = self._claim(keys=self._claim_keys, args=args)
        if found is None:
            return [], False
        words = iter([word.decode(errors="replace") for word in found])
        granted, has_put_aside = [], False
        for job_id, use, (verdict, maker, number) in zip(
            chosen, uses, zip(words, words, words, strict=True), strict=False
        ):
            if verdict == "claimed":
                self.waiting.serve(job_id)
                granted.append(Granted(job_id, use, self._last(use, maker, int(number))))
            elif verdict == "gone":  # somebody else took it from the list
                self.waiting.discard(job_id)
            elif verdict in ("held", "passed") and use.agent_id is not None:
                tries_soon = Aside(job_id, "", self._clock() + _HELD_S)
                self.waiting.lines.put_aside(
                    use.agent_id, self._passed(job_id, member_of(maker)) if verdict == "passed" else tries_soon
                )
                has_put_aside = True
        return granted, has_put_aside

    def _last(self, use: MemoryUse, maker: str, number: int) -> LastVersion | None:
        """A job that only reads holds off nobody, so its worker cannot be certain that it knows the newest version."""
        if not maker:
            return None
        is_here = maker == self._placement.worker_name and use.access == "write"
        return LastVersion(number, member_of(maker), is_here)


class EnqueuedAnew(Exception):
    """The hash holds another delivery since it was read."""


class RunsElsewhere(Exception):
    """Another member runs an earlier delivery of this id; the id has to wait until that run has ended."""


class JobStart:
    """Reads claimed jobs, starts them in RQ's terms, and numbers them."""

    def __init__(self, connection: Redis, registration: RqRegistration, lease: Lease, ends: JobFinish) -> None:
        """
        Args:
            ends: given to each claimed job; it also ends a job that cannot be run.
        """
        self._ends = ends
        self._in_flight = registration.in_flight
        self._connection = connection
        self._lease = lease
        self._worker_name = registration.name
        self._execution_ttl_s = registration.execution_ttl_s
        self._start_script = connection.register_script(lua("holds", "delivery", "start"))
        self._registries = [key for name in registration.queue_names() for key in self._keys(name, _REGISTRIES)]
        self._last_resort = ends.last_resort
        self._claim_numbers = itertools.count()

    def start(self, queue_name: str, job_id: str, last: LastVersion | None) -> RqClaimedJob | None:
        """``None`` if there is no job of this id that can run, or if it was refused.

        Raises:
            RunsElsewhere: its id has to wait; it is still among the claimed ones.
            RedisError: the server went away meanwhile; recovery finds a job that was begun.
        """
        if not is_rqs(job_id):
            self._give_up(queue_name, job_id, FOREIGN_ID)
            return None
        for _ in range(_READS):
            try:
                return self._start(queue_name, job_id, last)
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

    def _start(self, queue_name: str, job_id: str, last: LastVersion | None) -> RqClaimedJob | None:
        rq_job = self._read(job_id)
        # A job that is over was canceled since the claim, or its id was in the queue twice.
        if rq_job is None or rq_job.get_status(refresh=False) in OVER:
            log.info("no job %s waits any more; its id is dropped", job_id)
            self.drop_id(queue_name, job_id)
            return None
        rq_job.origin = queue_name
        try:
            execution = self._begin(rq_job)
        except NoSuchJobError:
            self.drop_id(queue_name, job_id)
            return None
        except OwnershipLost as error:
            log.warning("not started: %s", error)
            return None
        run = JobRun(rq_job, execution)
        try:
            return self._claimed(run, rq_job.read_request(), last)
        except RequestError as error:
            log_failure(job_id, error, queue=queue_name)
            self._refuse(run, error)
        except Exception as error:
            self._give_up(queue_name, job_id, error, execution)
        return None

    def _begin(self, rq_job: JsonJob) -> Execution:
        """Write execution, registry entry and status, in one step, while the claim is ours.

        A worker that slept after its claim would otherwise restart a job that another worker has finished, and a job
        that was canceled just now would be both started and canceled.

        Args:
            rq_job: as it was read; its `origin` is the queue that it was claimed from.

        Raises:
            EnqueuedAnew: the id has another delivery since the job was read.
            NoSuchJobError: the job was withdrawn, or waits or runs elsewhere.
            OwnershipLost: the claim is no longer this worker's.
            RunsElsewhere: another member runs another delivery.
            RedisError: the server went away; recovery finds a job that was begun.
        """
        queue_name, ttl_s = rq_job.origin, self._execution_ttl_s
        execution = Execution(uuid4().hex, rq_job.id, self._connection, self._worker_name)
        self._in_flight.starting(execution)
        keys = [
            *self._lease.keys,
            CLAIMED_KEY.format(queue=queue_name, member=self._lease.member),
            rq_job.key,
            *self._keys(queue_name, _WAITS),
            MEMBERS_KEY,
            BATCH_KEY.format(batch=rq_job.batch),
            *self._keys(queue_name, _CANCELED),
            execution.key,
            ExecutionRegistry(rq_job.id, connection=self._connection).key,
            rq_job.started_job_registry.key,
            execution.worker_executions_key,
            *self._registries,
        ]
        failure_ttl_s = DEFAULT_FAILURE_TTL_S if rq_job.failure_ttl is None else rq_job.failure_ttl
        prefix = execution.key.removesuffix(execution.id)
        moment = rq_job.started_at = rq_job.last_heartbeat = execution.created_at
        args = [*self._lease.args, rq_job.id, rq_job.stamp, FIELD_DELIVERY, failure_ttl_s, prefix, ttl_s]
        args += [utcformat(moment), int(moment.timestamp()), execution.id, self._worker_name]
        args += itertools.chain.from_iterable(execution.serialize().items())
        verdict: int = self._start_script(keys=keys, args=args)
        if verdict == 1:
            rq_job.worker_name, rq_job._status = self._worker_name, JobStatus.STARTED
            return execution
        if verdict == 0:
            raise OwnershipLost(f"job {rq_job.id} is no longer claimed by this worker")
        raise {-2: EnqueuedAnew, -3: RunsElsewhere}.get(verdict, NoSuchJobError)

    def _keys(self, queue_name: str, registries: Sequence[type[BaseRegistry]]) -> list[str]:
        return [registry(queue_name, connection=self._connection).key for registry in registries]

    def _claimed(
        self, run: JobRun, request: GenerationRequest | AgentRequest, last: LastVersion | None
    ) -> RqClaimedJob:
        if isinstance(request, GenerationRequest) and request.route and run.job.repeats_left:
            raise PayloadRefused("a job with a route ends in another queue than it began, so it cannot be repeated")
        rq_job, now = run.job, time.time()
        timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
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
            model=model_of(rq_job, request),
            last=last,
            was_saving=rq_job.was_saving,
            run=replace(run, writes=Writes.of(request, last.number if last else 0)),
            ends=self._ends,
            in_flight=self._in_flight,
        )

    def _refuse(self, run: JobRun, error: StokerError) -> None:
        for tries_left in (2, 1, 0):  # a refused job is in no table: nobody else tries again after a lost connection
            try:
                self._ends.fail(run, error)
                return
            except OwnershipLost:  # it was withdrawn just now
                self._ends.ownership.let_go(run)
                return
            except RedisError:
                if not tries_left:
                    raise

    def drop_id(self, queue_name: str, job_id: str) -> None:
        """Forget a claimed id that names no job to run."""
        key = CLAIMED_KEY.format(queue=queue_name, member=self._lease.member)
        self._connection.lrem(key, 1, raw(job_id))  # type: ignore[arg-type]

    def _read(self, job_id: str) -> JsonJob | None:
        try:
            return cast(JsonJob, JsonJob.fetch(job_id, connection=self._connection))
        except NoSuchJobError:  # its time to live in the queue has passed
            return None


class ClaimOrder:
    """Claims the next jobs of all queues, starts them, and enters them into the table of jobs in flight.

    Attributes:
        claimers: of the queues, by name, in the order in which they are served.
        has_claimed: whether there was a claim.
        is_suspended: whether the last claim saw that an operator has suspended the workers.
        has_unread: whether the last claim stopped before it knew all waiting jobs.
        knows_all: whether it came to know all of them. Neither is true after one that did not look.
    """

    def __init__(
        self,
        claimers: Mapping[str, Claimer],
        members: Members,
        job_start: JobStart,
        requeue: Requeue,
        in_flight: JobsInFlight[RqClaimedJob],
    ) -> None:
        self.claimers = claimers
        self.has_unread = self.knows_all = False
        self._members = members
        self._job_start = job_start
        self._requeue = requeue
        self._in_flight = in_flight
        self._repeated_ids: set[str] = set()
        self._elsewhere: dict[str, float] = {}
        self._quarantined_since: float | None = None
        self.has_claimed = self.is_suspended = False
        self._look = Periodic(_LOOK_AROUND_S)

    def waiting_agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that were read; the same object until they change, if one queue has any."""
        waiting = [agents for claimer in self.claimers.values() if (agents := claimer.agents())]
        return waiting[0] if len(waiting) == 1 else frozenset().union(*waiting)

    def place_of(self, agent_id: str) -> tuple[int, int]:
        """See `QueuePort.place_of`."""
        places = ((number, claimer.waiting.place_of(agent_id)) for number, claimer in enumerate(self.claimers.values()))
        return next(((number, at) for number, at in places if at is not None), (len(self.claimers), 0))

    def next_agents(self, limit: int) -> tuple[str, ...]:
        """See `QueuePort.next_agents`."""
        if not self.has_claimed:
            for claimer in self.claimers.values():
                claimer.read_ahead(0, Busy())
        running = {job.memory_use.agent_id for job in self._in_flight.snapshot()}
        found = (
            name for claimer in self.claimers.values() for name in claimer.waiting.next_agents(limit + len(running))
        )
        return tuple(islice(dict.fromkeys(name for name in found if name not in running), limit))

    def claim(self, limit: int, busy: Busy, claimed: list[RqClaimedJob]) -> None:
        """Claim and start up to `limit` jobs. Each is added to `claimed` at once, so that a later error loses none."""
        self.has_claimed = True
        for claimer in self.claimers.values():
            claimer.read_ahead(limit, busy)
        self.is_suspended = any(claimer.is_suspended for claimer in self.claimers.values())
        if self.is_suspended:
            return
        if limit > 0 and not self._in_flight and self._claim_quarantined(busy, claimed):
            return
        room = 0 if self._quarantined_comes_first(busy) else limit
        self._repeated_ids.intersection_update(self._in_flight)
        now = time.monotonic()
        self._elsewhere = {job_id: until for job_id, until in self._elsewhere.items() if until > now}
        busy = replace(busy, job_ids=frozenset(self._repeated_ids | self._elsewhere.keys()))
        for name, claimer in self.claimers.items():
            if len(claimed) < room:
                beside = busy.beside(job.memory_use for job in claimed)
                for granted in claimer.claim(room - len(claimed), beside):
                    self._start(name, granted, busy, claimed)
        self.has_unread = any(claimer.has_unread for claimer in self.claimers.values())
        self.knows_all = not self.has_unread

    def look_around(self) -> None:
        """After a claim: see which lines that were left to other workers need not wait for these any more."""
        if not self._look.is_due():
            return
        begin = time.thread_time()
        dead = self._members.dead
        for name, claimer in self.claimers.items():
            others = self._members.of(name).values()
            ready = (one.name for one in others if one.is_ready and not one.is_leaving and one not in dead)
            claimer.look_around(frozenset(ready))
        self._look.rest(_REST_SHARE * (time.thread_time() - begin))

    def _claim_quarantined(self, busy: Busy, claimed: list[RqClaimedJob]) -> bool:
        """While nothing is in flight, the quarantined jobs of all queues come first: they delay nobody then."""
        alone = Busy(memory_is_away=busy.memory_is_away)
        for name, claimer in self.claimers.items():
            if granted := claimer.claim_quarantined(alone):
                self._start(name, granted[0], alone, claimed)
                return True
        return False

    def _quarantined_comes_first(self, busy: Busy) -> bool:
        """True if a quarantined job has waited for so long that nothing may start before it. Of several workers on a
        queue, one stops for it."""
        alone = Busy(memory_is_away=busy.memory_is_away)
        waits = [name for name, claimer in self.claimers.items() if claimer.next_quarantined(alone) is not None]
        if not waits:
            self._quarantined_since = None
            return False
        if self._quarantined_since is None:
            self._quarantined_since = time.monotonic()
        if time.monotonic() - self._quarantined_since < _QUARANTINED_WAITS_S:
            return False
        return not frozenset(waits).isdisjoint(self._members.duties())

    def _start(self, name: str, granted: Granted, busy: Busy, claimed: list[RqClaimedJob]) -> None:
        job_id = granted.job_id
        if (running := self._in_flight.get(job_id)) is not None:
            self._put_back(name, running)
        elif (job := self._started(name, granted)) is not None:
            is_quarantined = job.attempt > 1
            beside = busy.beside(other.memory_use for other in claimed)
            is_misread = job.memory_use != granted.use
            if is_misread or beside.bars(job.memory_use) or (is_quarantined and self._in_flight):
                # The job has changed since it was read, or its producer's note is wrong. It waits until it may run.
                self.claimers[name].correct(job_id, job.memory_use, quarantined=is_quarantined)
                job.give_back(counts_as_attempt=False)
            else:
                self._in_flight.add(job)
                claimed.append(job)

    def _started(self, name: str, granted: Granted) -> RqClaimedJob | None:
        try:
            return self._job_start.start(name, granted.job_id, granted.last)
        except RunsElsewhere:
            self._requeue(Claim(granted.job_id, name, None), counts_as_attempt=False)
            self._elsewhere[granted.job_id] = time.monotonic() + _LOOK_AGAIN_S
            return None

    def _put_back(self, name: str, running: RqClaimedJob) -> None:
        """The id of a running job was claimed once more. It waits, unless it is the delivery that runs."""
        if running.is_ours():
            self._job_start.drop_id(name, running.job_id)
        else:
            self._requeue(Claim(running.job_id, name, None), counts_as_attempt=False)
            self._repeated_ids.add(running.job_id)
