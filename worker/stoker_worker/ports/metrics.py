"""The interface of the metrics: what the stages report, and what can be asked about a running worker. No I/O.

A stage reports an event in the terms of its own work. Only the package `metrics` knows the names under which it
is counted. `NOT_COUNTED` is for callers that count nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from stoker_worker.ports.engine import CompletedGeneration, KVMemory, SequenceProgress
from stoker_worker.ports.queue import NOTHING_LOST, DataLoss, Serving

End = Literal["agent_job", "withdrawn", "given_back", "dropped"]
"""Ends without a result of their own: a job about an agent's memory was done; a job was canceled, stopped or deleted;
it went back to the queue; its result came late, when the job was no longer this worker's."""


class MetricsPort:
    """Counts nothing here. No call raises, blocks or takes longer than some microseconds."""

    def answered(self, result: Mapping[str, Any], *, save_s: float = 0.0, replayed: bool = False) -> None:
        """A result (as JSON) was posted. Finisher threads.

        Args:
            save_s: how long the save of its turn took.
            replayed: it was made by an earlier delivery.
        """

    def failed(self, error: Exception) -> None:
        """A job failed; RQ may retry it. Finisher threads."""

    def ended(self, how: End, n_jobs: int = 1) -> None:
        """Finisher threads."""

    def escalated(self, n_prefilled: int) -> None:
        """An answer was rejected, and its job went on to another model. Finisher threads.

        Args:
            n_prefilled: tokens of its prompt that were not in a cache.
        """

    def recovered(self, n_jobs: int) -> None:
        """Jobs of dead workers are back in the queue. Fetcher and recovery threads."""

    def moved_in(self, n_agents: int) -> None:
        """Jobs have started whose agent's newest version another worker had made. Fetcher thread."""

    def restored(self, seconds: float, source: str) -> None:
        """Agent memory was looked up for one prompt, and read if there was any. Loader thread.

        Args:
            source: ``memory``, ``disk`` or ``none``.
        """

    def stepped(
        self, seconds: float, progress: Mapping[int, SequenceProgress], ended: Sequence[CompletedGeneration]
    ) -> None:
        """The engine took one step. Engine thread.

        Args:
            progress: of the sequences that are left in the engine, by uid.
            ended: the sequences that ended in this step.
        """


NOT_COUNTED: Final = MetricsPort()


@dataclass(frozen=True)
class WorkerState:
    """A running worker at one moment.

    Attributes:
        serving: ``None`` until the model is loaded.
        stages: how many jobs are in flight, by stage: ``memory`` (an agent's memory is loaded or saved), ``waiting``,
            ``prefill``, ``decode``.
        kv: ``None`` for an engine without a budget.
        step_age_s: how long the step under way has taken; 0 while the engine is empty.
        redis_away_s: for how long no heartbeat has reached Redis; 0 when the last one did.
        redis_away_total_s: the same, over all outages since the start.
        data_loss: data that Redis lost.
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
    """A shared store.

    Attributes:
        away_s: for how long it has not answered; 0: it does.
        written_bytes, read_bytes: since the start.
    """

    away_s: float
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class StoreUse:
    """Sizes in bytes. `disk_free_bytes` and `disk_size_bytes` are of the store's file system."""

    disk_bytes: int
    disk_max_bytes: int
    disk_free_bytes: int
    disk_size_bytes: int
    ram_bytes: int
    ram_max_bytes: int


@dataclass(frozen=True)
class QueueDepth:
    """The jobs that wait in one queue. `oldest_wait_s`: how long the oldest has waited; 0 if none waits."""

    name: str
    waiting: int
    oldest_wait_s: float
