"""How a job uses an agent's memory, which memory is in use, and how deliveries are told apart. No I/O; any thread."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stoker_shared.request import Access

PlaceOf = Callable[[str], tuple[int, int]]
"""As `QueuePort.place_of`."""


class LastVersion(NamedTuple):
    """What Redis knows of an agent's newest version: a hint and a lower bound, which may be lost without harm.

    Attributes:
        number: the version's.
        member: the worker that made it.
        is_here: whether this very process did.
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
        """From a request's fields. A job that does not use its agent's memory counts as a job without an agent."""
        return UNUSED if access == "none" or agent_id is None else cls(access, agent_id)


UNUSED = MemoryUse("none", None)


@dataclass(frozen=True)
class Busy:
    """Agents and jobs that are in use, so that certain jobs may not start.

    Attributes:
        writing: agents whose memory is being written: none of their jobs may start.
        reading: agents whose memory is being read: none of their jobs that write may start.
        job_ids: jobs that may not start, even if their agents are free.
        memory_is_away: no job that uses an agent's memory may start: the shared store does not answer.
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
        """Whether a job that uses memory like this has to wait."""
        if self.memory_is_away and use.agent_id is not None:
            return True
        return use.agent_id in self.writing or (use.access == "write" and use.agent_id in self.reading)

    def beside(self, uses: Iterable[MemoryUse]) -> "Busy":
        """The same, with jobs in flight that use memory like this."""
        all_uses = list(uses)
        return Busy(
            self.writing.union(use.agent_id for use in all_uses if use.agent_id and use.access == "write"),
            self.reading.union(use.agent_id for use in all_uses if use.agent_id and use.access == "read"),
            self.job_ids,
            self.memory_is_away,
        )


@dataclass(frozen=True)
class Delivery:
    """One enqueue of one job. Recovery and requeueing keep it; RQ's Repeat and a reused id make a new one.

    Attributes:
        created_at: from the job's hash; empty when its enqueuer wrote none.
        request: digest of the request.
    """

    job_id: str
    created_at: str
    repeats_left: int | None = None
    request: str = ""
