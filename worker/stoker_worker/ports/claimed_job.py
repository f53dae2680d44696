"""The interface of a claimed job. No I/O, no rq, no Redis."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker_shared.agents import AgentRequest
from stoker_shared.request import GenerationRequest
from stoker_worker.ports.agents import Delivery, LastVersion, MemoryUse
from stoker_worker.ports.cancel_token import CancelToken


@dataclass(frozen=True, eq=False, kw_only=True)
class ClaimedJob(Protocol):
    """A job that is this worker's to run, until it is released. Two of them are equal only if they are the same object.

    Each job is ended by one of `finish`, `fail`, `stop`, `give_back` and `drop`, and then released. They
    run on a finisher thread, or on the fetcher thread for a job that is not passed on. They may be repeated after
    `RedisUnavailable`, and each raises it.

    Attributes:
        attempt: 1, or more after a worker died with this job in flight.
        losses_alone: how many of these workers ran nothing else.
        enqueued_at, claimed_at: Unix time in seconds.
        claim_number: grows with each job that this process claims, whatever the clock does: jobs are given back in
            this order.
        lives_s: how long Redis may keep the job once its result is posted, with a margin for whoever still has it.
        deadline: `time.monotonic()` at which the job's own timeout passes; ``None`` for no timeout.
        model: the model that this run of the job is for; ``None``: any.
        last: what Redis knows of its agent's newest version; ``None``: nothing.
        was_saving: an earlier run of this delivery had begun to save its turn, which may still arrive.
        cancel: set when the job must not go on; the loader, the engine thread and the finisher look at it.
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
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self.request.access, self.request.agent_id)

    @property
    def moved_from(self) -> str | None:
        """The worker that made its agent's newest version, if that is another one."""
        return None if self.last is None or self.last.is_here else self.last.member

    def is_ours(self) -> bool:
        """Whether this run of the job is still this worker's to end."""
        ...

    def begin_save(self) -> None:
        """Refuse a cancel from here on: the turn of the job's agent is about to be saved.

        Raises:
            OwnershipLost: this run of the job is no longer this worker's. This and the ends below raise `JobLost` if
                that is because Redis has lost the job.
        """
        ...

    def finish(self, result: Mapping[str, Any]) -> bool:
        """Post the result (JSON values), or ask the next model of the job's route if its check rejects the answer.

        Returns:
            whether the job has ended; ``False``: it is in the next model's queue.

        Raises:
            OwnershipLost: the run is not ours any more; nothing was written.
        """
        ...

    def fail(self, error: Exception, partial_text: str | None = None, *, may_retry: bool = True) -> bool:
        """Fail the job with one readable line. RQ retries it if it has retries left and `error` may pass by itself. If
        the job is too long for this model, the next one of its route is asked.

        Returns:
            as `finish`.

        Raises:
            OwnershipLost: the run is not ours any more; nothing was written.
        """
        ...

    def stop(self) -> None:
        """End a job that was withdrawn."""
        ...

    def give_back(self, *, counts_as_attempt: bool, alone: bool = False) -> bool:
        """Put the job back at the very front of its queue.

        Args:
            counts_as_attempt: count it as lost with its worker.
            alone: nothing ran beside it when it was lost.

        Returns:
            ``False`` when it has ended meanwhile, a stop was asked for, or its queue is not ours any more.
        """
        ...

    def drop(self) -> None:
        """Remove our run of a job that is not ours any more; the job's own state is left as it is."""
        ...

    def release(self) -> None:
        """Free the job's place and its agent: this worker has nothing more to do with it."""
        ...
