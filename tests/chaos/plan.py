"""The jobs of a chaos run, and how they may end. Pure."""

from dataclasses import dataclass, field
from typing import Any

QUEUES = ("high", "low")


@dataclass(frozen=True)
class Again:
    """The id of a job, enqueued once more.

    Attributes:
        when: the job's state at that time, if it gets that far: ``queued``, ``started`` or ``ended``.
        job: the second request: the same, or another.
        same_moment: it has the first one's `created_at`. The same request is then the same delivery.
    """

    when: str
    job: "PlannedJob"
    same_moment: bool


@dataclass(frozen=True)
class PlannedJob:
    """One job.

    Attributes:
        agent: ``None`` for a job without one.
        options: RQ's, for `Queue.enqueue`.
        ends: the states it may end in if it is not withdrawn.
        short_lived: its own ttl may expire in the queue.
        withdraw: the way it is withdrawn: ``cancel`` and ``delete`` (RQ's own), ``ticket`` (ours), ``stop`` (command).
        withdraw_when: while it is ``queued`` or once it is ``started``.
        delay_s: for `enqueue_in`; ``None`` for at once.
        again: the second use of its id.
        reuses: the index of the job whose id this one has.
        parents: ids of the jobs it depends on.
        is_submitted: enqueued by `Producer.submit`, otherwise by RQ's own queue.
    """

    index: int
    agent: str | None
    queue: str
    context: str
    cache: str
    prompt: str
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    ends: frozenset[str] = frozenset({"finished"})
    withdraw: str | None = None
    withdraw_when: str = "queued"
    delay_s: float | None = None
    flaky: int = 0
    short_lived: bool = False
    is_poison: bool = False
    again: Again | None = None
    reuses: int | None = None
    parents: tuple[str, ...] = ()
    allow_failure: bool = False
    is_submitted: bool = False

    @property
    def name(self) -> str:
        """The name of the request: the result returns it."""
        return f"job-{self.index:05}"

    @property
    def job_id(self) -> str:
        return self.name if self.reuses is None else f"job-{self.reuses:05}"

    @property
    def keeps_order(self) -> bool:
        """Whether docs/lifecycle.md gives it a place in the order of its agent's jobs in its queue.

        It does not where the job goes to the front, or to the end once more, or its id has a place already.
        """
        retry = self.options.get("retry")
        if self.again or self.reuses is not None or self.parents:
            return False
        return not (self.options.get("at_front") or self.delay_s is not None or (retry and any(retry.intervals)))

    @property
    def request(self) -> dict[str, Any]:
        metadata = {"job": self.name} | ({"flaky": str(self.flaky)} if self.flaky else {})
        return {
            "agent_id": self.agent,
            "prompt": self.prompt,
            "context": self.context,
            "cache": self.cache,
            "max_tokens": self.max_tokens,
            "metadata": metadata,
        }
