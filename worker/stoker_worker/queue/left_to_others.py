"""Which waiting jobs of one queue a worker leaves to others, because it cannot serve them. Pure policy; fetcher thread.

Owns since when there is no worker that can serve them. A job waits for one for a while; after that it is claimed all
the same, and fails with the reason. A worker that is alone claims it at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

from stoker_shared.needs import NOTHING, Needs
from stoker_worker.queue.lines import Lines
from stoker_worker.queue.offers import Offer, serves
from stoker_worker.queue.waiting_job import Waiting


class Company(Protocol):
    """The other members of a queue; see `Members`."""

    def look(self) -> None: ...

    def is_served_elsewhere(self, queue: str, needs: Needs) -> bool: ...

    def had_company(self, queue: str, within_s: float) -> bool: ...


class LeftToOthers:
    """
    Attributes:
        offer: this worker's; ``None`` until its model is loaded: it leaves nothing to others then.
    """

    def __init__(
        self, lines: Lines, company: Company, queue: str, *, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            lines: the queue's waiting jobs; those that are left to others do not come up in them.
        """
        self._lines = lines
        self._company = company
        self._queue = queue
        self._wait_s = wait_s
        self._clock = clock
        self._is_left: dict[Needs, bool] = {}
        self._unserved: dict[Needs, float] = {}  # what no worker can serve, since when
        self._stuck: dict[str, float] = {}  # agents, since when
        self._too_late: frozenset[str] = frozenset()
        self._pages: list[str] = []
        self.offer: Offer | None = None
        lines.leaves = self.leaves

    def leaves(self, job: Waiting) -> bool:
        """Whether the job is left to others; the same until the next `look`."""
        if job.needs == NOTHING or job.use.agent_id in self._too_late:
            return False
        if job.needs not in self._is_left:
            self._is_left[job.needs] = self._decide(job.needs)
        return self._is_left[job.needs]

    def look_at_refused(self) -> None:
        """Before a claim: if this worker would claim what it cannot serve, another one may have come that can."""
        asked = self._lines.asked
        if any(not self._is_left.get(needs, True) and not serves(self.offer, needs) for needs in asked):
            self.look()

    def some_agents(self, count: int) -> list[str]:
        """Some of the agents whose next job is left to others; at each call others, until all were looked at."""
        if not self._pages:
            self._pages = [name for name in self._lines.left if isinstance(name, str)]
        page, self._pages = self._pages[:count], self._pages[count:]
        return [agent_id for agent_id in page if agent_id in self._lines.left]

    def stay(self, agents: Collection[str], *, among: Collection[str]) -> None:
        """The next jobs of the agents `among` are left to others, but the memory of these cannot leave this worker."""
        before = {name: since for name, since in self._stuck.items() if name in agents or name not in among}
        self._stuck = {**dict.fromkeys(agents, self._clock()), **before}

    def look(self) -> None:
        """Decide anew which jobs are left to others."""
        before, was_too_late = self._is_left, self._too_late
        self._unserved = {needs: at for needs, at in self._unserved.items() if needs in self._lines.asked}
        self._stuck = {agent_id: at for agent_id, at in self._stuck.items() if self._cannot_serve_next(agent_id)}
        self._is_left = {needs: self._decide(needs) for needs in self._lines.asked}
        self._too_late = frozenset(agent_id for agent_id, at in self._stuck.items() if self._is_over(at))
        if self._too_late != was_too_late or any(before.get(needs) != now for needs, now in self._is_left.items()):
            self._lines.reconsider()

    def served_by_nobody(self, most: int) -> list[tuple[Needs, int]]:
        """What the waiting jobs need that no worker can serve, and how many jobs do; the most frequent first."""
        jobs = Counter({needs: self._lines.asked[needs] for needs in self._unserved})
        return [(needs, n_jobs) for needs, n_jobs in jobs.most_common(most) if n_jobs]

    def stuck_here(self, most: int) -> list[tuple[Needs, int]]:
        """The same for what others could serve, if the agents' memory were not here only."""
        heads = filter(None, map(self._lines.first_of, self._stuck))
        return Counter(head.needs for head in heads if head.needs not in self._unserved).most_common(most)

    def _cannot_serve_next(self, agent_id: str) -> bool:
        head = self._lines.first_of(agent_id)
        return head is not None and not serves(self.offer, head.needs)

    def _is_over(self, since: float) -> bool:
        return self._clock() - since >= self._wait_s

    def _decide(self, needs: Needs) -> bool:
        if serves(self.offer, needs):
            return False
        if self._may_be_served(needs):
            return True
        self._company.look()  # the job would be refused, and another worker may have come that can serve it
        return self._may_be_served(needs)

    def _may_be_served(self, needs: Needs) -> bool:
        if self._company.is_served_elsewhere(self._queue, needs):
            self._unserved.pop(needs, None)
            return True
        since = self._unserved.setdefault(needs, self._clock())
        return self._company.had_company(self._queue, self._wait_s) and not self._is_over(since)
