"""The deliveries that the producers of a chaos run sent: what, when, how often, and with which answer. Any thread."""

from dataclasses import dataclass, field

from tests.chaos.plan import PlannedJob

UNKNOWN = "unknown"
ENDED = {"finished", "failed", "stopped", "canceled"}


@dataclass
class Delivery:
    """One request under one id with one creation time, sent once or more often.

    Attributes:
        created_at: the value in the job's hash; ``None`` where the producer chose it.
        met: for each time it was sent, the state of the job that had the id; ``None``: the id was free.
        is_acknowledged: one of the sends was answered. Otherwise the job may exist or not.
        is_settled: it will not be sent again.
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
        """How many ends it may have: each send after an end adds one, except sends by the producer."""
        return 1 if self.job.is_submitted else 1 + sum(state in {*ENDED, UNKNOWN} for state in self.met[1:])
