"""The waiting jobs of one queue by agent: a line for each, and the orders in which the heads of the lines come. Pure
policy, no I/O; fetcher thread.

Owns the lines, and which of them are aside, because another worker has a job of the agent in flight or has its cache.
These stay in order and cost a choice nothing.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from stoker_worker.queue.waiting_job import Line, Waiting


class Aside(NamedTuple):
    """Why a line is aside.

    Attributes:
        job_id: its head, when that was noted.
        maker: the RQ worker that the line is left to; empty while a job of the agent is in flight elsewhere.
        until: when to try again, by the clock of whoever put it aside.
    """

    job_id: str
    maker: str
    until: float


class Lines:
    """
    Attributes:
        heads: of all lines that are not aside, in queue order.
        turns: the agents' heads among these, with when each agent was served; sorted.
        aside: the agents whose lines are aside.
    """

    def __init__(self) -> None:
        self.heads: list[Waiting] = []
        self.turns: list[tuple[int, Waiting]] = []
        self.aside: dict[str, Aside] = {}
        self._lines: dict[Line, list[Waiting]] = {}
        self._served_at: dict[Line, int] = {}  # counts places given; not there for an agent that was never served
        self._agents: frozenset[str] | None = None

    def clear(self) -> None:
        """Forget all lines, and which agents were served. Which lines are aside stays known."""
        self._lines, self._served_at, self._agents = {}, {}, None
        self.heads, self.turns = [], []

    def add(self, job: Waiting) -> None:
        line = self._take_out(job.line)
        insort(line, job)
        self._put_in(job.line, line)

    def remove(self, job: Waiting) -> None:
        line = self._take_out(job.line)
        line.remove(job)
        self._put_in(job.line, line)

    def serve(self, job: Waiting, n_served: int) -> None:
        """The job's line has had its turn, the one of this number."""
        line = self._take_out(job.line)
        self._served_at[job.line] = n_served
        self._put_in(job.line, line)

    def first_of(self, name: Line) -> Waiting | None:
        """The head of a line, also of one that is aside. Any thread."""
        return next(iter(self._lines.get(name, ())), None)

    def behind(self, job: Waiting) -> list[Waiting]:
        """The next job of the same line, if there is one."""
        line = self._lines[job.line]
        at = line.index(job) + 1
        return line[at : at + 1]

    def agents(self) -> frozenset[str]:
        """The agents of all lines that are not aside; the same object until they change."""
        if self._agents is None:
            self._agents = frozenset(name for name in self._lines if isinstance(name, str) and name not in self.aside)
        return self._agents

    def put_aside(self, agent_id: str, why: Aside) -> None:
        """None of the agent's jobs comes up from now on."""
        line = self._take_out(agent_id)
        self._agents, self.aside[agent_id] = None, why
        if line:
            self._put_in(agent_id, line)

    def take_back(self, agents: Iterable[str]) -> None:
        """These agents' jobs come up again. There may be very many."""
        found = (name for name in agents if self.aside.pop(name, None) is not None)
        heads = [self._lines[name][0] for name in found if name in self._lines]
        if heads:
            self._agents = None
            self.heads = sorted([*self.heads, *heads])
            self.turns = sorted([*self.turns, *((self._served_at.get(job.line, 0), job) for job in heads)])

    def _take_out(self, name: Line) -> list[Waiting]:
        """A line to be changed. Until `_put_in`, its head is not among the heads."""
        line = self._lines.get(name, [])
        if line and name not in self.aside:
            del self.heads[bisect_left(self.heads, line[0])]
            if isinstance(name, str):
                del self.turns[bisect_left(self.turns, (self._served_at.get(name, 0), line[0]))]
        return line

    def _put_in(self, name: Line, line: list[Waiting]) -> None:
        is_agents = isinstance(name, str)
        if is_agents and bool(line) != (name in self._lines):
            self._agents = None
        if not line:
            self._lines.pop(name, None)
            self._served_at.pop(name, None)
            if isinstance(name, str):
                self.aside.pop(name, None)
            return
        self._lines[name] = line
        if name in self.aside:
            return
        insort(self.heads, line[0])
        if is_agents:
            insort(self.turns, (self._served_at.get(name, 0), line[0]))
