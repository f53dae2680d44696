"""The interface of the queue. No I/O, no rq, no Redis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from stoker_shared.answer_parts import Markers
from stoker_worker.ports.agents import Busy
from stoker_worker.ports.claimed_job import ClaimedJob
from stoker_worker.ports.engine import SequenceProgress


@dataclass(frozen=True)
class Serving:
    """What a worker offers.

    Attributes:
        context_tokens: the longest prompt and answer together.
        mode: how its sequences run.
        max_batch: most jobs in flight at once.
        max_batch_why: what decided that number.
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
    """What a worker has noticed of data that Redis lost, since the worker's start.

    Attributes:
        times: how often.
        jobs: how many jobs it had in flight then, over all times.
        ago_s: time since the last one; infinite if there was none.
    """

    times: int
    jobs: int
    ago_s: float


NOTHING_LOST: Final = DataLoss(0, 0, float("inf"))


class TextSoFar(NamedTuple):
    """The text that a job in flight has generated, and the markers of its answer."""

    text: str
    markers: Markers


class QueuePort(Protocol):
    """The durable queue, and the one table of the jobs that this worker has in flight.

    Runs on the fetcher thread where nothing else is noted. Each call that asks Redis raises `RedisUnavailable` while
    the server is away or cannot work.
    """

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        """Take up to `limit` waiting jobs that may run beside one another and beside what is busy. They are in flight
        from then on.

        No job of an agent passes one that waits before it, unless both only read.
        """
        ...

    def prefer(self, is_at_hand: Callable[[str], bool]) -> None:
        """From now on `claim` lets jobs of such agents, and jobs without an agent, pass others, within bounds. Any
        thread, before the first claim; `is_at_hand` is called on the fetcher thread and must not block."""
        ...

    def in_flight(self) -> tuple[ClaimedJob, ...]:
        """The jobs that were claimed and not released, in the order of their claim: a snapshot for any thread."""
        ...

    def wait_for_release(self, timeout_s: float) -> bool:
        """Wait until a job was released since the last call that returned ``True``; ``False`` when none was in time."""
        ...

    def has_unread(self) -> bool:
        """Whether the last `claim` stopped before it knew all that waits, so that the next may find more."""
        ...

    def knows_all(self) -> bool:
        """Whether the last `claim` has looked at all that waits: then `waiting_agents` are all that there are."""
        ...

    def waiting_agents(self) -> frozenset[str]:
        """Agents of waiting jobs, as far as `claim` has looked. No round trip; the same object until they change."""
        ...

    def place_of(self, agent_id: str) -> tuple[int, int]:
        """Which queue the agent's next job waits in, and how far behind: sooner ones are smaller. After all others if
        none is known to wait. Any thread; no round trip."""
        ...

    def next_agents(self, limit: int) -> tuple[str, ...]:
        """At most `limit` agents of waiting jobs, about in the order in which `claim` would take these; without those
        that have a job in flight. Changes nothing.

        Before the first `claim`, while no other thread uses the queue's waiting jobs, it asks Redis, a little further
        each time. After that: as far as `claim` has looked, and no round trip.
        """
        ...

    def withdrawn(self, progress: Mapping[str, SequenceProgress]) -> list[ClaimedJob]:
        """The jobs in flight that were canceled, stopped or deleted meanwhile.

        Publishes `progress`, which is by job id (a job that is missing there is being loaded), and notices new readers
        of a job's text.
        """
        ...

    def listened_to(self) -> frozenset[int]:
        """Jobs in flight whose text is read as it is generated, by `claim_number`; no round trip."""
        ...

    def tell(self, texts: Mapping[int, TextSoFar]) -> None:
        """Publish the texts of such jobs as far as they go, by `claim_number`."""
        ...

    def recover(self) -> int:
        """Put back the jobs that dead workers had in flight; returns how many. At the start on the recovery thread."""
        ...

    def has_dead(self) -> bool:
        """Whether the last `claim` saw that another worker has died, whose jobs `recover` puts back; no round trip."""
        ...

    def leave(self) -> None:
        """Instead of `claim`, while this worker drains: other workers no longer leave agents' jobs to it."""
        ...

    def tidy(self) -> bool:
        """One small step of housekeeping, about once a second: what is due by the clock, got lost or expired.

        Returns:
            whether there is more to do at once.
        """
        ...

    def is_empty(self) -> bool:
        """Whether no job waits in any of the queues."""
        ...

    def announce(self, serving: Serving) -> None:
        """Show producers and other workers what this worker serves; no round trip. Main thread, before the first
        `claim`."""
        ...

    def beat(self) -> bool:
        """Show that this worker lives; ``False`` when another has taken over its queues. Heartbeat thread."""
        ...

    def data_loss(self) -> DataLoss:
        """What was noticed of data that Redis lost. Any thread; no round trip."""
        ...

    def is_suspended(self) -> bool:
        """Whether the last `claim` saw that an operator has suspended the workers. Any thread; no round trip."""
        ...

    def hang_up(self) -> None:
        """Stop waiting for an unreachable server: calls under way fail now, later ones soon. Main thread."""
        ...
