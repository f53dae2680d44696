"""What the people of a chaos run have enqueued: what, when, how often, and what they were told. Any thread."""

from dataclasses import dataclass, field

from tests.chaos.plan import PlannedJob

UNKNOWN = "unknown"
ENDED = {"finished", "failed", "stopped", "canceled"}


@dataclass
class Delivery:
    """One request under one id, from one moment, sent once or more often.

    Attributes:
        created_at: as it stands in the job's hash; ``None`` where the producer chose it.
        met: for each time it was sent, the state of what had the id then; ``None``: nothing had it.
        is_acknowledged: one of those times was answered. Else the job may be there or not.
        is_settled: it is not sent any more.
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
        """How often it may have ended: one that is sent when it has ended does so once more, but by the producer."""
        return 1 if self.job.is_submitted else 1 + sum(state in {*ENDED, UNKNOWN} for state in self.met[1:])
