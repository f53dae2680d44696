"""Claims jobs and starts them: as many as there is room for, but a quarantined job alone. Fetcher thread.

A `Claimer` serves one queue: its script takes the jobs that `FairQueue` chooses out of the queue and starts them. It
keeps how long jobs have been left to the workers with their agents' caches, and which ids another worker still runs.
`ClaimOrder` serves all queues: it makes an `RqClaimedJob` of each started job, or fails the job with one line if its
data is malformed. It owns the claim numbers, and how long a quarantined job has waited. Jobs in flight are known by
their id, so the second delivery of an id starts only after the first has ended.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import islice
from math import inf
from typing import Any, Final, NamedTuple
from uuid import uuid4

from redis import Redis
from redis.exceptions import RedisError
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.rate_limit import RateLimitRegistry
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import now, utcformat

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import OwnershipLost, PayloadRefused, RequestError, StokerError
from stoker_shared.request import GenerationRequest
from stoker_shared.text import message_line
from stoker_shared.wire import (
    BATCH_KEY,
    COUNTS_KEY,
    DEFAULT_FAILURE_TTL_S,
    DEFAULT_JOB_TIMEOUT_S,
    FIELD_BATCH,
    FIELD_DELIVERY,
    FIELD_SAVING,
    MEMBERS_KEY,
    TAKEN_KEY,
)
from stoker_worker.events import log_failure
from stoker_worker.periodic import Periodic
from stoker_worker.placement.placement import FRAGMENT, Placement, Writes, as_field
from stoker_worker.ports import Busy, Delivery, LastVersion, MemoryUse, MetricsPort
from stoker_worker.queue.cascade import model_of
from stoker_worker.queue.client import lua
from stoker_worker.queue.end import FOREIGN_ID, JobFinish, RqClaimedJob, is_the_jobs
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.json_job import MOST_BYTES, READ_FIELDS, JobRun, JsonJob, fields_in, is_rqs, raw
from stoker_worker.queue.lease import Lease, Members
from stoker_worker.queue.registration import EXECUTION_TTL_S, RqRegistration, member_of
from stoker_worker.queue.waiting import Aside, QueueView

log = logging.getLogger(__name__)

_CLAIM_TRIES: Final = 8  # in one claim, while lines are put aside
_TRIED_AT_ONCE: Final = 32  # jobs, from the second try on: many may be left to the same worker
_MOST_PASSED: Final = 10_000
_HELD_S: Final = 0.5
"""A line whose agent has a job in flight at another worker is tried again after this time."""

_QUARANTINED_WAITS_S: Final = 5.0
"""How long other jobs still start while a quarantined job waits. After that nothing is claimed until it has run."""

_LOOK_AGAIN_S: Final = 1.0
"""An id of which another worker runs an earlier delivery is tried again after this time."""

_LOOK_AROUND_S: Final = 0.5
_REST_SHARE: Final = 20.0
"""`look_around` scans all lines that are aside, then pauses this many times as long as that took."""

_WAITS: Final = (ScheduledJobRegistry, DeferredJobRegistry)
_REGISTRIES: Final = (*_WAITS, ReadyJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
IN_THE_WAY: Final = PayloadRefused("RQ cannot start the job: a key of it has another type")


class Granted(NamedTuple):
    """A job that was claimed and started, or that cannot be started.

    Attributes:
        use: its memory use, as it was read before the claim.
        execution: ``None`` if it cannot be started: its id is still in the queue.
        fields: of its hash, as from `fields_in`.
        last: as in `ClaimedJob`.
    """

    job_id: str
    use: MemoryUse
    execution: Execution | None = None
    fields: Mapping[bytes, bytes | int] = {}
    last: LastVersion | None = None


class Claimer:
    """Claims the jobs of one queue. A job that was in flight in two lost workers is quarantined: it is claimed alone,
    so that a job that kills its workers takes no other jobs down with it a third time."""

    def __init__(
        self,
        connection: Redis,
        queue_name: str,
        lease: Lease,
        placement: Placement,
        registration: RqRegistration,
        *,
        is_at_hand: Callable[[str], bool],
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            is_at_hand: as in `FairQueue`.
            patience_s: how long a job is left to the worker with its agent's cache, once this worker has passed it.
        """
        self._connection = connection
        self._lease = lease
        self._placement = placement
        self._patience_s = patience_s
        self._clock = clock
        self._queue_name = queue_name
        self._key = Queue(queue_name, connection=connection).key
        self._in_flight = registration.in_flight
        self._worker_name = registration.name
        self._about = json.dumps(_about(queue_name, lease, placement, registration))
        self._claim = connection.register_script(FRAGMENT + lua("fields", "claim"))
        self.view = QueueView(connection, queue_name, is_at_hand, is_shared=bool(lease.shared))
        self.waiting = self.view.waiting
        self._passed_at: dict[str, float] = {}
        self._elsewhere: dict[str, float] = {}
        self._idle_at = -inf  # when a claim last left a place free
        self._has_untried = False

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """As `QueueView.read_ahead`."""
        self._has_untried = False
        self.view.read_ahead(limit, busy)

    @property
    def has_unread(self) -> bool:
        """As `QueueView.has_unread`; also true if the last claim ended before it had tried all jobs that may run."""
        return self.view.has_unread or self._has_untried

    def elsewhere(self) -> Iterable[str]:
        """The ids that another worker was found to run within the last `_LOOK_AGAIN_S`."""
        now = time.monotonic()
        self._elsewhere = {job_id: until for job_id, until in self._elsewhere.items() if until > now}
        return self._elsewhere

    def claim(self, limit: int, busy: Busy) -> list[Granted]:
        """Claim up to `limit` jobs that may run beside what is busy, none of them quarantined; nothing if the lease has
        another holder, or an operator has suspended the workers."""
        granted: list[Granted] = []
        for n in range(_CLAIM_TRIES):
            left = limit - len(granted)
            chosen = self.waiting.choose(max(left, _TRIED_AT_ONCE) if n and left > 0 else left, busy)
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
        """As `claim`, for the oldest quarantined job. The caller makes sure that the job runs alone."""
        job_id = self.next_quarantined(busy)
        return [] if job_id is None else self._take([job_id], 1)[0]

    def next_quarantined(self, busy: Busy) -> str | None:
        """The oldest quarantined job that may run and is still in the queue; ``None`` if there is none."""
        while (job_id := self.waiting.next_quarantined(busy)) is not None:
            if self._connection.lpos(self._key, raw(job_id)) is not None:  # type: ignore[arg-type]
                return job_id
            self.waiting.discard(job_id)
        return None

    def look_around(self, ready: Container[str]) -> None:
        """Take back the lines that need not wait any more. `ready`: the other members to which lines may be left."""
        lines, now, back = self.waiting.lines, self._clock(), []
        if len(self._passed_at) > _MOST_PASSED + len(self.waiting):  # kept: a job that goes back has waited already
            self._passed_at = {job_id: at for job_id, at in self._passed_at.items() if job_id in self.waiting}
        for agent_id, why in lines.aside.items():
            head = lines.first_of(agent_id)
            if now >= why.until or (why.maker and why.maker not in ready):
                back.append(agent_id)
            elif why.maker and head is not None and head.job_id != why.job_id:  # the maker has taken that one
                lines.aside[agent_id] = self._passed(head.job_id, why.maker)
        lines.take_back(back)

    def _passed(self, job_id: str, maker: str) -> Aside:
        """The patience with a job begins when it could have been claimed here for the first time."""
        return Aside(job_id, maker, self._passed_at.setdefault(job_id, self._clock()) + self._patience_s)

    def _is_impatient(self, job_id: str) -> bool:
        """True if the patience with a job is over. It begins anew if every claim since has filled all places."""
        passed_at = self._passed_at.get(job_id, inf)
        is_over = self._clock() - passed_at >= self._patience_s or not self._patience_s
        if is_over and self._patience_s and self._idle_at < passed_at:
            del self._passed_at[job_id]
            return False
        return is_over

    def _take(self, chosen: Sequence[str], limit: int) -> tuple[list[Granted], bool]:
        """Claim the first `limit` of these that are ours to claim; also returns whether a line was put aside."""
        if not chosen:
            return [], False
        granted = [Granted(job_id, self.waiting.use_of(job_id)) for job_id in chosen if not is_rqs(job_id)]
        for one in granted:
            self.waiting.discard(one.job_id)
        chosen, moment = [job_id for job_id in chosen if is_rqs(job_id)], now()
        uses, runs = [self.waiting.use_of(job_id) for job_id in chosen], [self._run(one, moment) for one in chosen]
        at = moment.timestamp()
        args: list[Any] = [self._about, self._lease.value, limit, utcformat(moment), int(at), at]
        for job_id, use, run in zip(chosen, uses, runs, strict=True):
            word = b""
            if use.agent_id is not None:
                mode = b"w" if use.access == "write" else b"r"
                word = mode + (b"1" if self._is_impatient(job_id) else b"0") + as_field(use.agent_id)
            args += [-1 if self.waiting.is_nearer_to_the_end(job_id) else 1, raw(job_id), word, run.id]
        keys = [self._key, self._lease.keys[0], WORKERS_SUSPENDED]
        parts = iter((self._claim(keys=keys, args=args) if chosen else []) or [])
        replies = list(zip(parts, parts, parts, parts, strict=True))
        n_claimed, has_put_aside = 0, False
        for job_id, use, run, (verdict, maker, number, values) in zip(chosen, uses, runs, replies, strict=False):
            last = self._last(use, maker.decode(errors="replace"), int(number))
            if verdict == b"claimed":
                n_claimed += 1
                self.waiting.serve(job_id)
                granted.append(Granted(job_id, use, run, fields_in(values), last))
            elif verdict in (b"held", b"passed") and use.agent_id is not None:
                why = Aside(job_id, "", self._clock() + _HELD_S)
                if verdict == b"passed":
                    why = self._passed(job_id, member_of(maker.decode(errors="replace")))
                self.waiting.lines.put_aside(use.agent_id, why)
                has_put_aside = True
            elif verdict == b"elsewhere":
                self._elsewhere[job_id] = time.monotonic() + _LOOK_AGAIN_S
            else:  # it was taken from the list, is dropped, or cannot be started
                self.waiting.discard(job_id)
                if verdict == b"over":
                    log.info("no job %s waits any more; its id is dropped", job_id)
                elif verdict == b"refused":
                    granted.append(Granted(job_id, use))
        self._has_untried |= bool(replies) and len(replies) < len(chosen) and n_claimed < limit
        return granted, has_put_aside

    def _run(self, job_id: str, moment: datetime) -> Execution:
        """The execution that the job gets if it is claimed."""
        run = Execution(uuid4().hex, job_id, self._connection, self._worker_name)
        run.created_at = run.last_heartbeat = moment
        self._in_flight.starting(job_id)
        return run

    def _last(self, use: MemoryUse, maker: str, number: int) -> LastVersion | None:
        """As `ClaimedJob.last`. Never `is_here` for a job that only reads, because it holds off no writer."""
        if not maker:
            return None
        is_here = maker == self._placement.worker_name and use.access == "write"
        return LastVersion(number, member_of(maker), is_here)


def _about(
    queue_name: str, lease: Lease, placement: Placement, registration: RqRegistration
) -> Mapping[str, str | int | Sequence[str]]:
    """The arguments of the claim script that stay the same."""

    def keys(name: str, registries: Sequence[type[BaseRegistry]]) -> list[str]:
        return [registry(name, connection=registration.connection).key for registry in registries]

    executions = ExecutionRegistry("", connection=registration.connection).key
    execution = Execution("", "", connection=registration.connection).key.removesuffix(":")
    started, scheduled, deferred, canceled = keys(queue_name, (StartedJobRegistry, *_WAITS, CanceledJobRegistry))
    return {
        **{"queue": queue_name, "member": lease.member, "worker": registration.name, "ttl": EXECUTION_TTL_S},
        **{"started": started, "scheduled": scheduled, "deferred": deferred, "canceled": canceled},
        **{"held": [*placement.held.values()], "last": [*placement.last.values()], "members": MEMBERS_KEY},
        **{"is_shared": bool(lease.shared), "taken": TAKEN_KEY.format(queue=queue_name)},
        **{"counts": COUNTS_KEY.format(queue=queue_name), "batches": BATCH_KEY.format(batch="")},
        **{"jobs": Job.key_for(""), "executions": executions, "execution": execution},
        **{"of_worker": WORKER_EXECUTIONS_KEY_TEMPLATE.format(registration.name)},
        **{"registries": [key for name in registration.queue_names() for key in keys(name, _REGISTRIES)]},
        **{"fields": [name.decode() for name in READ_FIELDS], "most_bytes": MOST_BYTES, "delivery": FIELD_DELIVERY},
        **{"saving": FIELD_SAVING, "batch": FIELD_BATCH, "failure_ttl": DEFAULT_FAILURE_TTL_S},
    }


class ClaimOrder:
    """Claims the next jobs of all queues, starts them, and enters them into the table of jobs in flight.

    Attributes:
        claimers: by the names of the queues, in the order in which these are served.
        has_claimed: whether there was a claim.
        is_suspended, has_unread, knows_all: as in `QueuePort`. The last two are false after a claim that did not look.
    """

    def __init__(
        self,
        connection: Redis,
        claimers: Mapping[str, Claimer],
        members: Members,
        ends: JobFinish,
        in_flight: JobsInFlight[RqClaimedJob],
        *,
        metrics: MetricsPort,
    ) -> None:
        """`ends`: given to each claimed job; it also fails a job that cannot be run."""
        self._connection = connection
        self.claimers = claimers
        self.has_unread = self.knows_all = False
        self._members = members
        self._ends = ends
        self._in_flight = in_flight
        self._metrics = metrics
        self._quarantined_since: float | None = None
        self.has_claimed = self.is_suspended = False
        self._look = Periodic(_LOOK_AROUND_S)
        self._claim_numbers = itertools.count()

    def waiting_agents(self) -> frozenset[str]:
        """See `QueuePort.waiting_agents`. If several queues have agents, each call makes a new object."""
        waiting = [agents for claimer in self.claimers.values() if (agents := claimer.waiting.lines.agents())]
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
        before, self.is_suspended = self.is_suspended, any(one.view.is_suspended for one in self.claimers.values())
        if self.is_suspended != before:
            suspended = "suspended (rq suspend): no job is claimed until rq resume; jobs in flight go on"
            log.warning(suspended if self.is_suspended else "no longer suspended: jobs are claimed again")
        if self.is_suspended:
            return
        if limit > 0 and not self._in_flight and self._claim_quarantined(busy, claimed):
            return
        room = 0 if self._quarantined_comes_first(busy) else limit
        busy = replace(busy, job_ids=self._elsewhere().union(self._in_flight))
        for name, claimer in self.claimers.items():
            if len(claimed) < room:
                ids = busy.job_ids.union(job.job_id for job in claimed)  # an id may be in two queues
                beside = replace(busy, job_ids=ids).beside(job.memory_use for job in claimed)
                self._start(name, claimer.claim(room - len(claimed), beside), busy, claimed)
        self.has_unread = any(claimer.has_unread for claimer in self.claimers.values())
        self.knows_all = not self.has_unread

    def look_around(self) -> None:
        """After a claim: take back the lines that need not wait for other workers any more."""
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
        """Claim a quarantined job of any queue; ``False``: there is none. Only while nothing is in flight, so that it
        delays nobody."""
        alone = Busy(job_ids=self._elsewhere(), memory_is_away=busy.memory_is_away)
        for name, claimer in self.claimers.items():
            if granted := claimer.claim_quarantined(alone):
                self._start(name, granted, alone, claimed, is_alone=True)
                return True
        return False

    def _quarantined_comes_first(self, busy: Busy) -> bool:
        """True if a quarantined job has waited so long that nothing may start here before it. Of several workers on a
        queue, only one stops for it."""
        alone = Busy(job_ids=self._elsewhere(), memory_is_away=busy.memory_is_away)
        waits = [name for name, claimer in self.claimers.items() if claimer.next_quarantined(alone) is not None]
        if not waits:
            self._quarantined_since = None
            return False
        if self._quarantined_since is None:
            self._quarantined_since = time.monotonic()
        if time.monotonic() - self._quarantined_since < _QUARANTINED_WAITS_S:
            return False
        return not frozenset(waits).isdisjoint(self._members.duties())

    def _elsewhere(self) -> frozenset[str]:
        return frozenset(job_id for claimer in self.claimers.values() for job_id in claimer.elsewhere())

    def _start(
        self, name: str, found: Sequence[Granted], busy: Busy, claimed: list[RqClaimedJob], *, is_alone: bool = False
    ) -> None:
        back: list[RqClaimedJob] = []
        for granted in found:
            if (job := self.read(name, granted)) is None:
                continue
            beside = busy.beside(other.memory_use for other in (*claimed, *back))
            is_misread = job.memory_use != granted.use or (job.is_quarantined and not is_alone)
            if is_misread or beside.bars(job.memory_use):
                # The job has changed since it was read, or its producer's note is wrong. It waits until it may run.
                self.claimers[name].view.correct(job.job_id, job.memory_use, quarantined=job.is_quarantined)
                back.append(job)
            else:
                self._in_flight.add(job)
                claimed.append(job)
        for job in reversed(back):  # each goes to the very front
            job.give_back(counts_as_attempt=False)

    def read(self, queue_name: str, granted: Granted) -> RqClaimedJob | None:
        """The started job; ``None`` if it was refused. Raises `RedisError` if Redis is away: recovery finds the job."""
        job_id, execution = granted.job_id, granted.execution
        if execution is None:
            error = IN_THE_WAY if is_rqs(job_id) else FOREIGN_ID
            with suppress(OwnershipLost):  # nothing is ours to write
                if self._ends.fail_waiting(queue_name, job_id, f"{type(error).__name__}: {error}"):
                    self._metrics.failed(error)
            return None
        rq_job = JsonJob(job_id, connection=self._connection)
        run = JobRun(rq_job, execution)
        try:
            rq_job.restore(granted.fields)
            rq_job.origin, rq_job.worker_name = queue_name, execution.worker_name
            rq_job.started_at = rq_job.last_heartbeat = execution.created_at
            rq_job._status = JobStatus.STARTED
            return self._claimed(run, rq_job.read_request(), granted.last)
        except RequestError as error:
            log_failure(job_id, error, queue=queue_name)
            try:
                self._ends.fail(run, error)
                self._metrics.failed(error)
            except OwnershipLost:  # it was withdrawn just now
                self._ends.ownership.let_go(run)
            if rq_job.rate_limit_key:  # RQ gave it a place for which other jobs wait; they are refused in their turn
                with suppress(RedisError, ValueError):  # anybody may write anything
                    RateLimitRegistry.from_job(rq_job).release_stale_and_enqueue(job_id)
        except Exception as error:
            if isinstance(error, StokerError) or not is_the_jobs(error):
                raise
            rq_job.origin, rq_job.started_at = queue_name, execution.created_at
            refused = PayloadRefused(f"RQ cannot start the job: {message_line(error)}")
            with suppress(OwnershipLost):  # nothing is ours to write
                self._ends.fail_bare(run, f"{type(refused).__name__}: {refused}")
                self._metrics.failed(refused)
        return None

    def _claimed(
        self, run: JobRun, request: GenerationRequest | AgentRequest, last: LastVersion | None
    ) -> RqClaimedJob:
        rq_job, now = run.job, time.time()
        timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
        rq_job.drop_data()
        return RqClaimedJob(
            job_id=rq_job.id,
            queue=rq_job.origin,
            request=request,
            delivery=Delivery(rq_job.id, rq_job.raw_created_at, rq_job.digest()),
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
