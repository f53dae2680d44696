"""The seam of the queue: claimed jobs, and what may be done with them. No I/O, no rq."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stoker_shared.request import GenerationRequest
from stoker_worker.ports.agents import Busy, MemoryUse
from stoker_worker.ports.memory import Delivery


class Latch:
    """Set once, with a reason, by one thread; read by others."""

    def __init__(self) -> None:
        self._reason: CancelReason | None = None

    @property
    def reason(self) -> "CancelReason | None":
        return self._reason

    def set(self, reason: "CancelReason") -> None:
        self._reason = self._reason or reason


CancelReason = Literal["withdrawn", "timed out", "stopping"]
"""Somebody canceled, stopped or deleted the job; its own timeout passed; the worker stops and gives it back."""


@dataclass(frozen=True)
class ClaimedJob:
    """A job that is this worker's to run.

    Attributes:
        attempt: 1, or more after a worker died with this job in flight.
        lost_alone: how many of these workers ran nothing else.
        enqueued_at, claimed_at: Unix time in seconds.
        claim_number: grows with each job this process claims: the order to give them back in. A clock may jump.
        deadline: `time.monotonic()` at which the job's own timeout passes; ``None`` for no timeout.
        handle: the queue adapter's own record of it; nobody else looks inside.
        cancel: set by the inbox when the job must not go on; the loader and the engine look at it.
    """

    job_id: str
    queue: str
    request: GenerationRequest
    delivery: Delivery
    attempt: int
    enqueued_at: float
    claimed_at: float
    claim_number: int
    deadline: float | None
    handle: Any = field(repr=False)
    lost_alone: int = 0
    cancel: Latch = field(default_factory=Latch, repr=False, compare=False)

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self.request.access, self.request.agent_id)


class QueuePort(Protocol):
    """The durable queue. Claiming and watching run on the inbox thread, ending jobs on the finaliser thread."""

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        """Take up to `limit` waiting jobs that may run beside one another and beside what is busy.

        Of an agent's jobs none passes by one that waits before it, unless both only read.
        """
        ...

    def has_unread(self) -> bool:
        """Whether the last `claim` stopped before it knew all that waits, so that the next may find more."""
        ...

    def waiting_agents(self) -> frozenset[str]:
        """Agents of waiting jobs, as far as `claim` has looked; asks nobody. The same object while nothing changes."""
        ...

    def withdrawn(self, jobs: Sequence[ClaimedJob], progress: Mapping[str, int]) -> list[ClaimedJob]:
        """Which of `jobs` somebody canceled, stopped or deleted meanwhile; publishes `progress` (tokens by job id)."""
        ...

    def owns(self, job: ClaimedJob) -> bool:
        """Whether this execution is still this worker's to end."""
        ...

    def finish(self, job: ClaimedJob, result: Mapping[str, Any]) -> None:
        """
        Raises:
            OwnershipLost: the execution is not ours any more; nothing was written.
        """
        ...

    def fail(
        self, job: ClaimedJob, error: Exception, partial_text: str | None = None, *, may_retry: bool = True
    ) -> None:
        """Fail the job with one readable line; RQ retries it if it has retries left and `error` may pass by itself.

        Raises:
            OwnershipLost: the execution is not ours any more; nothing was written.
        """
        ...

    def stopped(self, job: ClaimedJob) -> None:
        """End a job that `withdrawn` named."""
        ...

    def drop(self, job: ClaimedJob) -> None:
        """Forget a job that is not ours any more: our execution is removed, the job's own state is left as it is."""
        ...

    def give_back(self, jobs: Sequence[ClaimedJob], *, counts_as_attempt: bool, alone: bool = False) -> int:
        """Put jobs back at the front of their queues, in their order.

        Args:
            counts_as_attempt: they were lost, as if with their worker.
            alone: one that nothing ran beside when it was.

        Returns:
            how many: none that has ended meanwhile, and none at all when the queue is not ours any more.
        """
        ...

    def recover(self) -> int:
        """Put back what dead workers had in flight; returns how many jobs that were."""
        ...

    def tidy(self) -> bool:
        """One small step of housekeeping, about once a second: what is due by the clock, got lost or expired.

        Returns:
            whether there is more to do at once.
        """
        ...

    def announce(self, serves: str) -> None:
        """What this worker serves, for people who look at it in the queue; asks nobody. Main thread."""
        ...

    def is_empty(self) -> bool:
        """Whether no job waits in any of the queues."""
        ...

    def beat(self) -> bool:
        """Show that this worker lives; ``False`` when it has been deposed. Heartbeat thread."""
        ...
