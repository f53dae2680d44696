"""The interfaces of the queue and of a claimed job, and the use of agents by jobs. No I/O, no rq, no Redis."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from stoker_shared.agents import AgentRequest
from stoker_shared.answer_parts import Markers
from stoker_shared.request import Access, GenerationRequest
from stoker_worker.ports.engine import SequenceProgress

PlaceOf = Callable[[str], tuple[int, int]]
"""The type of `QueuePort.place_of`."""


class LastVersion(NamedTuple):
    """An agent's newest version as Redis knows it: a hint and a lower bound, which may be lost without harm.

    Attributes:
        member: the worker that made it.
        is_here: whether this very process made it.
    """

    number: int
    member: str
    is_here: bool


class MemoryUse(NamedTuple):
    """How a job uses an agent's memory. `agent_id` is ``None`` if and only if `access` is ``none``."""

    access: Access
    agent_id: str | None

    @classmethod
    def of(cls, access: Access, agent_id: str | None) -> "MemoryUse":
        """From a request's fields. A job that does not use its agent's memory counts as one without an agent."""
        return UNUSED if access == "none" or agent_id is None else cls(access, agent_id)


UNUSED = MemoryUse("none", None)


@dataclass(frozen=True)
class Busy:
    """Agents and jobs in use, and so the jobs that may not start.

    Attributes:
        writing: agents whose memory is being written: none of their jobs may start.
        reading: agents whose memory is being read: none of their jobs that write may start.
        job_ids: jobs that may not start even if their agents are free.
        memory_is_away: the shared store does not answer: no job that uses an agent's memory may start.
    """

    writing: frozenset[str] = frozenset()
    reading: frozenset[str] = frozenset()
    job_ids: frozenset[str] = frozenset()
    memory_is_away: bool = False

    @property
    def agents(self) -> frozenset[str]:
        """The agents whose memory is in use."""
        return self.writing | self.reading

    def bars(self, use: MemoryUse) -> bool:
        """True if a job with this memory use has to wait."""
        if self.memory_is_away and use.agent_id is not None:
            return True
        return use.agent_id in self.writing or (use.access == "write" and use.agent_id in self.reading)

    def beside(self, uses: Iterable[MemoryUse]) -> "Busy":
        """The same, with jobs in flight that have these memory uses."""
        all_uses = list(uses)
        return Busy(
            self.writing.union(use.agent_id for use in all_uses if use.agent_id and use.access == "write"),
            self.reading.union(use.agent_id for use in all_uses if use.agent_id and use.access == "read"),
            self.job_ids,
            self.memory_is_away,
        )


@dataclass(frozen=True)
class Delivery:
    """One enqueueing of one job. Recovery and requeueing keep it; a reused id makes a new one.

    Attributes:
        created_at: from the job's hash; empty if its enqueuer wrote none.
        request: digest of the request.
    """

    job_id: str
    created_at: str
    request: str = ""


CancelReason = Literal["withdrawn", "timed out", "stopping"]
"""The job was canceled, stopped or deleted; its own timeout passed; the worker stops and gives it back."""


class CancelToken:
    """Tells a job in flight to stop. Any thread may set it or read it; the first reason stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: CancelReason | None = None

    @property
    def reason(self) -> CancelReason | None:
        return self._reason

    def set(self, reason: CancelReason) -> None:
        with self._lock:
            self._reason = self._reason or reason


@dataclass(frozen=True, eq=False, kw_only=True)
class ClaimedJob(Protocol):
    """A job that is this worker's to run until it is released. Two are equal only if they are the same object.

    One of `finish`, `fail`, `stop`, `give_back` and `drop` ends it, on a finisher thread, or on the fetcher thread if
    it is not passed on; then `release` follows. Each end raises `RedisUnavailable`, and may be repeated after that.

    Attributes:
        attempt: 1, and 1 more for each worker that died with this job in flight.
        losses_alone: how many of these workers ran nothing else.
        enqueued_at, claimed_at: Unix time in seconds.
        claim_number: grows with each job that this process claims, whatever the clock does: jobs are given back in this
            order.
        lives_s: how long Redis may keep the job after its result is posted, with a margin.
        deadline: when the job's own timeout passes, by `time.monotonic()`; ``None``: no timeout.
        model: the model that this run is for; ``None``: any.
        last: what Redis knows of the agent's newest version; ``None``: nothing.
        was_saving: an earlier run of this delivery had begun to save its turn, which may still arrive.
        cancel: set when the job must stop; the loader, the engine thread and the finisher look at it.
    """

    job_id: str
    queue: str
    request: GenerationRequest | AgentRequest = field(repr=False)
    delivery: Delivery
    attempt: int
    losses_alone: int = 0
    enqueued_at: float
    claimed_at: float
    claim_number: int
    deadline: float | None
    model: str | None = None
    last: LastVersion | None = None
    was_saving: bool = False
    cancel: CancelToken = field(default_factory=CancelToken, repr=False)

    @property
    def lives_s(self) -> float: ...

    @property
    def is_quarantined(self) -> bool:
        """At least two workers died with it in flight, so it runs alone."""
        return self.attempt > 2

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self.request.access, self.request.agent_id)

    @property
    def moved_from(self) -> str | None:
        """The other worker that made the newest version of its agent, if another one did."""
        return None if self.last is None or self.last.is_here else self.last.member

    def begin_save(self) -> None:
        """Refuse a cancel from here on: the agent's turn is about to be saved.

        Raises:
            OwnershipLost: this run of the job is no longer ours. This and the ends below raise `JobLost` if that is
                because Redis has lost the job.
        """
        ...

    def finish(self, result: Mapping[str, Any]) -> bool:
        """Post the result (JSON values), or ask the next model of the job's route if its check rejects the answer.

        Returns:
            whether the job has ended; ``False``: it is in the next model's queue.

        Raises:
            OwnershipLost: the run is no longer ours; nothing was written.
        """
        ...

    def fail(self, error: Exception, partial_text: str | None = None, *, may_retry: bool = True) -> bool:
        """Fail the job with one readable line. RQ retries it if it has retries left and `error` may pass by itself. A
        job that is too long for this model goes to the next one of its route. Returns and raises as `finish`."""
        ...

    def stop(self) -> None:
        """End a job that was withdrawn."""
        ...

    def give_back(self, *, counts_as_attempt: bool, alone: bool = False) -> bool:
        """Put the job back at the very front of its queue.

        Args:
            counts_as_attempt: count it as lost with its worker.
            alone: nothing else ran when it was lost.

        Returns:
            ``False`` if it has ended meanwhile, a stop was asked for, or its queue is no longer ours.
        """
        ...

    def drop(self) -> None:
        """Remove our run of a job that is no longer ours, and leave the job's own state as it is."""
        ...

    def release(self) -> None:
        """Free the job's place and its agent: this worker is done with it."""
        ...


@dataclass(frozen=True)
class Serving:
    """A worker's offer to producers.

    Attributes:
        context_tokens: the longest prompt and answer together.
        mode: how its sequences run.
        max_batch, max_batch_why: most jobs in flight at once, and what decided that number.
    """

    model: str
    context_tokens: int
    mode: str
    max_batch: int
    max_batch_why: str

    def __str__(self) -> str:
        width = f"at most {self.max_batch} jobs in flight ({self.max_batch_why})"
        return f"model {self.model}, context {self.context_tokens} tokens, rows {self.mode}, {width}"


@dataclass(frozen=True)
class DataLoss:
    """The losses of Redis' data that a worker has noticed since its start.

    Attributes:
        jobs: jobs in flight when they happened, in all.
        ago_s: time since the last one; infinite if there was none.
    """

    times: int
    jobs: int
    ago_s: float


NOTHING_LOST: Final = DataLoss(0, 0, float("inf"))


class TextSoFar(NamedTuple):
    """The text that a job in flight has generated so far, and the markers of its answer."""

    text: str
    markers: Markers


class QueuePort(Protocol):
    """The durable queue, and the one table of the jobs that this worker has in flight. Fetcher thread, unless a method
    names another. Calls that ask Redis raise `RedisUnavailable` while the server is away or cannot work."""

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        """Take up to `limit` waiting jobs that may run beside one another and beside `busy`: they are in flight from
        now on.

        An agent's jobs stay in order, unless both of two only read. Jobs without an agent, and those of agents whose
        caches are at hand, may pass others, within bounds.
        """
        ...

    def in_flight(self) -> tuple[ClaimedJob, ...]:
        """The jobs claimed and not released, in the order of their claim: a snapshot for any thread."""
        ...

    def wait_for_release(self, timeout_s: float) -> bool:
        """Wait for a release since the last call that returned ``True``; ``False`` if none came in time."""
        ...

    def has_unread(self) -> bool:
        """True if the last `claim` stopped before it had seen all waiting jobs, so that the next may find more."""
        ...

    def knows_all(self) -> bool:
        """True if the last `claim` has seen all waiting jobs: `waiting_agents` is complete."""
        ...

    def waiting_agents(self) -> frozenset[str]:
        """Agents of waiting jobs, as far as `claim` has looked. No round trip; the same object until they change."""
        ...

    def place_of(self, agent_id: str) -> tuple[int, int]:
        """The queue in which the agent's next job waits, and its place there; smaller is sooner. Larger than all others
        if none is known to wait. Any thread; no round trip."""
        ...

    def next_agents(self, limit: int) -> tuple[str, ...]:
        """At most `limit` agents of waiting jobs, about in the order in which `claim` would take these, without agents
        that have a job in flight. Changes nothing.

        Before the first `claim` it asks Redis, a little further each time. Later it knows what `claim` has read, and
        makes no round trip.
        """
        ...

    def withdrawn(self, progress: Mapping[str, SequenceProgress]) -> list[ClaimedJob]:
        """The jobs in flight that were canceled, stopped or deleted meanwhile. Also publishes `progress`, by job id (a
        job that is missing there is being loaded), and notices new readers of a job's text."""
        ...

    def listened_to(self) -> frozenset[int]:
        """The `claim_number` of each job in flight whose text is read as it is generated; no round trip."""
        ...

    def tell(self, texts: Mapping[int, TextSoFar]) -> None:
        """Publish the texts of such jobs so far, by `claim_number`."""
        ...

    def recover(self) -> int:
        """Put back the jobs that dead workers had in flight; returns how many."""
        ...

    def has_dead(self) -> bool:
        """True if the last `claim`, or `next_agents` before the first one, saw that another worker has died, whose jobs
        `recover` puts back, or if `recover` broke off; no round trip."""
        ...

    def leave(self) -> None:
        """Replaces `claim` while this worker drains: other workers no longer leave agents' jobs to it."""
        ...

    def tidy(self) -> bool:
        """One small step of housekeeping (what is due by the clock, got lost or expired), about once a second. Returns
        whether there is more to do at once."""
        ...

    def is_empty(self) -> bool:
        """True if no job waits in any of the queues."""
        ...

    def announce(self, serving: Serving) -> None:
        """Show producers and other workers what this one serves; no round trip. Main thread, before any `claim`."""
        ...

    def beat(self) -> bool:
        """Show that this worker lives; ``False`` if another one has taken over its queues. Heartbeat thread."""
        ...

    def data_loss(self) -> DataLoss:
        """The losses of Redis' data noticed so far. Any thread; no round trip."""
        ...

    def is_suspended(self) -> bool:
        """True if the last `claim` saw that an operator has suspended the workers. Any thread; no round trip."""
        ...

    def hang_up(self) -> None:
        """Stop waiting for an unreachable server: calls under way fail now, later ones soon. Main thread."""
        ...
