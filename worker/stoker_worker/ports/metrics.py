"""The interface of the metrics: what the stages report, and what can be asked about a running worker. No I/O.

A stage reports events in its own terms. Only the package `metrics` knows under which names they are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from stoker_worker.ports.engine import CompletedGeneration, KVMemory, SequenceProgress
from stoker_worker.ports.queue import NOTHING_LOST, DataLoss, Serving

End = Literal["agent_job", "withdrawn", "given_back", "dropped"]
"""Ends without a result of their own: a job about an agent's memory was done; a job was canceled, stopped or deleted;
it went back to the queue; it was no longer this worker's when its result came."""


class MetricsPort:
    """Counts nothing here. No call raises, blocks or takes longer than some microseconds."""

    def answered(self, result: Mapping[str, Any], *, save_s: float = 0.0, replayed: bool = False) -> None:
        """A result (as JSON) was posted, after a save of `save_s`. `replayed`: by an earlier delivery. Finisher
        threads."""

    def failed(self, error: Exception) -> None:
        """A job failed; RQ may retry it. Finisher threads; the fetcher thread for a job refused when it was claimed."""

    def ended(self, how: End, n_jobs: int = 1) -> None:
        """Jobs ended without a result. Finisher threads."""

    def escalated(self, n_prefilled: int) -> None:
        """An answer was rejected, and its job went to another model. Finisher threads.

        Args:
            n_prefilled: tokens of its prompt that were not in a cache.
        """

    def recovered(self, n_jobs: int) -> None:
        """Jobs of dead workers are back in the queue. Fetcher thread."""

    def moved_in(self, n_agents: int) -> None:
        """Jobs were claimed, for `n_agents` agents whose newest version another worker had made. Fetcher thread."""

    def restored(self, seconds: float, source: str) -> None:
        """Agent memory was looked up for a prompt; `source` is ``memory``, ``disk`` or ``none``. Loader thread."""

    def stepped(
        self, seconds: float, progress: Mapping[int, SequenceProgress], ended: Sequence[CompletedGeneration]
    ) -> None:
        """The engine took one step. `progress` is about the sequences left in the engine, by uid; `ended` are those
        that ended in this step. Engine thread."""


NOT_COUNTED: Final = MetricsPort()


@dataclass(frozen=True)
class WorkerState:
    """A running worker at one moment.

    Attributes:
        serving: ``None`` until the model is loaded.
        stages: the number of jobs in flight by stage: ``memory`` (an agent's memory is being loaded or saved),
            ``waiting``, ``prefill``, ``decode``.
        kv: ``None`` for an engine without a budget.
        step_age_s: the age of the step under way; 0 while the engine is empty.
        redis_away_s: for how long no heartbeat has reached Redis; 0 if the newest one did.
        redis_away_total_s: the sum over all outages since the start.
        is_suspended: an operator has suspended the workers (`rq suspend`).
    """

    serving: Serving | None = None
    stages: Mapping[str, int] = field(default_factory=dict)
    kv: KVMemory | None = None
    step_age_s: float = 0.0
    redis_away_s: float = 0.0
    redis_away_total_s: float = 0.0
    data_loss: DataLoss = NOTHING_LOST
    is_suspended: bool = False

    @property
    def in_flight(self) -> int:
        return sum(self.stages.values())

    @property
    def in_batch(self) -> int:
        return self.stages.get("prefill", 0) + self.stages.get("decode", 0)


@dataclass(frozen=True)
class SharedUse:
    """A shared store: seconds since it stopped answering (0: it answers), and bytes moved since the start."""

    away_s: float
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class StoreUse:
    """Sizes in bytes; `disk_free_bytes` and `disk_size_bytes` are those of the store's file system."""

    disk_bytes: int
    disk_max_bytes: int
    disk_free_bytes: int
    disk_size_bytes: int
    ram_bytes: int
    ram_max_bytes: int


@dataclass(frozen=True)
class QueueDepth:
    """How many jobs wait in one queue, and for how long the oldest has waited (0: none waits)."""

    name: str
    waiting: int
    oldest_wait_s: float
