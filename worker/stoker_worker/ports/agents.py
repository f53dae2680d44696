"""Whose memory a job uses and how, and which agents' memory is in use. Pure; any thread."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stoker_shared.request import Access


class MemoryUse(NamedTuple):
    """`agent_id` is ``None`` when, and only when, `access` is ``none``."""

    access: Access
    agent_id: str | None

    @classmethod
    def of(cls, access: Access, agent_id: str | None) -> "MemoryUse":
        """Of a request's own fields: a job that does not touch its agent's memory is as good as one without agent."""
        return UNUSED if access == "none" or agent_id is None else cls(access, agent_id)


UNUSED = MemoryUse("none", None)


@dataclass(frozen=True)
class Busy:
    """What must not be started beside what is in flight.

    Attributes:
        writing: agents of which nothing may start.
        reading: agents of which nothing that writes may start.
        job_ids: jobs that may not start themselves, though their agents are free.
    """

    writing: frozenset[str] = frozenset()
    reading: frozenset[str] = frozenset()
    job_ids: frozenset[str] = frozenset()

    @property
    def agents(self) -> frozenset[str]:
        return self.writing | self.reading

    def bars(self, use: MemoryUse) -> bool:
        """Whether a job that uses memory in this way has to wait."""
        return use.agent_id in self.writing or (use.access == "write" and use.agent_id in self.reading)

    def beside(self, uses: Iterable[MemoryUse]) -> "Busy":
        """The same, with these in flight too."""
        all_uses = list(uses)
        return Busy(
            self.writing.union(use.agent_id for use in all_uses if use.agent_id and use.access == "write"),
            self.reading.union(use.agent_id for use in all_uses if use.agent_id and use.access == "read"),
            self.job_ids,
        )
