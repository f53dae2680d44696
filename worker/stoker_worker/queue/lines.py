"""The waiting jobs of one queue by agent: a line for each, and the orders in which the heads of the lines come. Pure
policy, no I/O; fetcher thread.

Owns the lines, and which of them do not come up here: those aside, of agents that are at home at another worker, and
those left, whose next job this worker cannot serve. They stay in order and cost a choice nothing.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from heapq import nsmallest

from stoker_shared.needs import NOTHING, Needs
from stoker_worker.queue.waiting_job import Line, Waiting


class Lines:
    """
    Attributes:
        leaves: whether this worker leaves a job to others. Call `reconsider` when that has changed.
        heads: of all lines that come up here, in queue order.
        turns: the agents' heads among these, with when each agent was served; sorted.
        aside: the agents whose lines are aside, each with the worker that runs its jobs.
        left: the heads of the lines that are left to others, and are not aside.
        asked: how many jobs need what, without those that every worker can serve.
    """

    def __init__(self) -> None:
        self.leaves: Callable[[Waiting], bool] = lambda job: False
        self.heads: list[Waiting] = []
        self.turns: list[tuple[int, Waiting]] = []
        self.aside: dict[Line, str] = {}
        self.left: dict[Line, Waiting] = {}
        self.asked: Counter[Needs] = Counter()
        self._lines: dict[Line, list[Waiting]] = {}
        self._served_at: dict[Line, int] = {}  # counts places given; not there for an agent that was never served
        self._agents: frozenset[str] | None = None

    def clear(self) -> None:
        """Forget all lines, and which agents were served. Where agents are at home stays known."""
        self._lines, self._served_at, self._agents = {}, {}, None
        self.heads, self.turns = [], []
        self.left, self.asked = {}, Counter()

    def add(self, job: Waiting) -> None:
        if job.needs != NOTHING:
            self.asked[job.needs] += 1
        line = self._take_out(job.line)
        insort(line, job)
        self._put_in(job.line, line)

    def remove(self, job: Waiting) -> None:
        if job.needs != NOTHING:
            self.asked[job.needs] -= 1
            if not self.asked[job.needs]:
                del self.asked[job.needs]
        line = self._take_out(job.line)
        line.remove(job)
        self._put_in(job.line, line)

    def serve(self, job: Waiting, n_served: int) -> None:
        """The job's line has had its turn, the one of this number."""
        line = self._take_out(job.line)
        self._served_at[job.line] = n_served
        self._put_in(job.line, line)

    def first_of(self, name: Line) -> Waiting | None:
        """The head of a line, whether it comes up here or not. Any thread."""
        return next(iter(self._lines.get(name, ())), None)

    def behind(self, job: Waiting) -> list[Waiting]:
        """The next job of the same line, if there is one, and it is not left to others."""
        line = self._lines[job.line]
        at = line.index(job) + 1
        return [job for job in line[at : at + 1] if not self.leaves(job)]

    def agents(self) -> frozenset[str]:
        """The agents of all lines that are not aside; the same object until they change."""
        if self._agents is None:
            self._agents = frozenset(name for name in self._lines if isinstance(name, str) and name not in self.aside)
        return self._agents

    # --- lines aside ---

    def put_aside(self, agent_id: str, home: str) -> None:
        """None of the agent's jobs comes up from now on: `home` runs them."""
        line = self._take_out(agent_id)
        self._agents, self.aside[agent_id] = None, home
        if line:
            self._put_in(agent_id, line)

    def take_back(self, agents: Iterable[Line]) -> None:
        """These agents' jobs come up again. There may be very many: their home has left."""
        back = [name for name in agents if self.aside.pop(name, None) is not None and name in self._lines]
        if back:
            self._agents = None
            self._enter(back)

    def reconsider(self) -> None:
        """Find out anew which lines are left to others."""
        self.heads, self.turns, self.left = [], [], {}
        self._enter([name for name in self._lines if name not in self.aside])

    def prune_aside(self) -> None:
        """Forget agents of which no job waits."""
        for agent_id in self.aside.keys() - self._lines.keys():
            del self.aside[agent_id]

    def first_aside(self, limit: int, *, with_memory_from: Container[str] = ()) -> list[tuple[str, str]]:
        """The agents aside whose next job this worker could run, the oldest job first, each with its home.

        Args:
            with_memory_from: the workers whose agents may come although the job continues what is stored.
        """
        heads = [line[0] for line in map(self._lines.get, self.aside) if line]
        here = (job for job in heads if not job.quarantined and not self.leaves(job))
        movable = (job for job in here if not job.use.continues or self.aside[job.line] in with_memory_from)
        return [(name, self.aside[name]) for job in nsmallest(limit, movable) if (name := job.use.agent_id) is not None]

    def n_ahead(self, agent_id: str) -> int | None:
        """How many lines have an older head than this agent's; ``None`` if none of its jobs comes up here."""
        head = None if agent_id in self.aside or agent_id in self.left else self.first_of(agent_id)
        return None if head is None else bisect_left(self.heads, head)

    def _enter(self, names: Sequence[Line]) -> None:
        """Put many lines, none of them aside, among the heads or those left."""
        heads = [(name, self._lines[name][0]) for name in names]
        self.left |= {name: head for name, head in heads if self.leaves(head)}
        here = [(name, head) for name, head in heads if name not in self.left]
        self.heads = sorted([*self.heads, *(head for _, head in here)])
        turns = ((self._served_at.get(name, 0), head) for name, head in here if isinstance(name, str))
        self.turns = sorted([*self.turns, *turns])

    def _take_out(self, name: Line) -> list[Waiting]:
        """A line to be changed. Until `_put_in`, its head is not among the heads."""
        line = self._lines.get(name, [])
        if line and self.left.pop(name, None) is None and name not in self.aside:
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
            self.aside.pop(name, None)
            return
        self._lines[name] = line
        if name in self.aside:
            return
        if self.leaves(line[0]):
            self.left[name] = line[0]
            return
        insort(self.heads, line[0])
        if is_agents:
            insort(self.turns, (self._served_at.get(name, 0), line[0]))
