"""Who waits in which order, and who is next. Pure policy, no I/O; inbox thread.

Owns the order of one queue as last seen, and how each waiting job uses whose memory. Places go alternately to the
oldest job of a free agent, so that nobody waits for ever however many others come, and to the free agent that was
served longest ago (turns.py), so that nobody's first job waits for all of another's. Every agent's jobs stand in a line
of their own, of which only the heads are looked at: choosing costs the number of busy agents, not of waiting jobs. Of
the jobs at the head that only read, as many may go as there is room; one that writes goes alone. Removed jobs leave
stale entries behind, which are skipped when they come to light.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from math import inf

from stoker_worker.ports import Busy, MemoryUse
from stoker_worker.rq_worker.heads import Entry, Heads, Line
from stoker_worker.rq_worker.turns import Turns


class Lineup:
    """The waiting jobs of one queue."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._places

    def clear(self) -> None:
        """Forget all: whoever is seen next counts as never served."""
        self._places: dict[str, int] = {}
        self._order: deque[Entry] = deque()
        self._unlearned: deque[Entry] = deque()
        self._lines: dict[Line, deque[Entry]] = {}
        self._heads, self._turns = Heads(self._head), Turns(self._head)
        self._n_served = 0
        self._suspects: dict[str, int] = {}
        self._agent_of: dict[str, str] = {}
        self._readers: set[str] = set()
        self._passed: Counter[Line] = Counter()  # how many at a line's front are chosen already, while choosing
        self._jobs_of: Counter[str] = Counter()
        self._agents: frozenset[str] | None = None
        self._front, self._back = 0, 0

    def append(self, job_ids: Iterable[str]) -> None:
        """Jobs that came in at the end; one that is here already has moved there."""
        for job_id in job_ids:
            self.discard(job_id)
            self._places[job_id] = self._back
            entry = Entry(self._back, job_id)
            self._order.append(entry)
            self._unlearned.append(entry)
            self._back += 1

    def prepend(self, job_ids: Iterable[str]) -> None:
        """Jobs that came in at the front, in queue order."""
        for job_id in reversed(list(job_ids)):
            self.discard(job_id)
            self._front -= 1
            self._places[job_id] = self._front
            entry = Entry(self._front, job_id)
            self._order.appendleft(entry)
            self._unlearned.appendleft(entry)

    def discard(self, job_id: str) -> None:
        self._places.pop(job_id, None)
        self._suspects.pop(job_id, None)
        self._readers.discard(job_id)
        agent_id = self._agent_of.pop(job_id, None)
        if agent_id is not None:
            self._jobs_of[agent_id] -= 1
            if not self._jobs_of[agent_id]:
                del self._jobs_of[agent_id]
                self._lines.pop((0, agent_id), None)
                self._turns.forget((0, agent_id))
                self._agents = None

    def serve(self, job_id: str) -> None:
        """Take out a job that got its place; `choose` alone changes nothing."""
        agent_id = self._agent_of.get(job_id)
        self.discard(job_id)
        self._n_served += 1
        if agent_id is not None and agent_id in self._jobs_of:
            self._turns.serve((0, agent_id))

    def agents(self) -> frozenset[str]:
        """The agents of all jobs that were learned; the same object until that changes."""
        if self._agents is None:
            self._agents = frozenset(self._jobs_of)
        return self._agents

    def first(self, count: int) -> list[str]:
        """The first `count` jobs, in order."""
        while self._order and self._is_stale(self._order[0]):
            self._order.popleft()
        return [entry.job_id for entry in islice(self._order, 2 * count) if not self._is_stale(entry)][:count]

    def last(self, count: int) -> list[str]:
        """The last `count` jobs, the very last one first."""
        while self._order and self._is_stale(self._order[-1]):
            self._order.pop()
        return [entry.job_id for entry in islice(reversed(self._order), 2 * count) if not self._is_stale(entry)][:count]

    def unlearned(self, count: int) -> list[str]:
        """The first `count` jobs whose agent is not known yet. Nothing behind them is ever chosen."""
        self._next_unlearned()
        return [entry.job_id for entry in islice(self._unlearned, count) if not self._is_stale(entry)]

    def learn(self, job_id: str, use: MemoryUse, *, suspect: bool) -> None:
        """Say whose memory it uses, and how; in the order of `unlearned`."""
        while (entry := self._next_unlearned()) is not None and entry.job_id != job_id:
            self._unlearned.popleft()
        if entry is None:
            return
        self._unlearned.popleft()
        agent_id = use.agent_id
        if agent_id is not None:
            self._agent_of[job_id] = agent_id
            if use.access == "read":
                self._readers.add(job_id)
            self._agents = self._agents if self._jobs_of[agent_id] else None
            self._jobs_of[agent_id] += 1
        if suspect:
            self._suspects[job_id] = entry.place
        key = self._line_of(job_id)
        line = self._lines.setdefault(key, deque())
        if not line or entry < line[0]:
            line.appendleft(entry)
            self._heads.add(entry, key)
            if agent_id is not None:
                self._turns.add(entry, key)
        elif entry > line[-1]:
            line.append(entry)
        else:
            insort(line, entry)

    def choose(self, limit: int, busy: Busy) -> list[str]:
        """The next jobs, at most `limit`, that may run beside one another and beside what is busy. They stay here.

        A job that uses no memory has its place in queue order, but no turn. A suspect is never among them, nor what its
        agent has behind it; others pass it by.
        """
        unread = self._next_unlearned()
        end = inf if unread is None else unread.place
        writing, had_a_place = set(busy.writing), set[Line]()

        def is_barred(line: Line) -> bool:
            head = self._head(line)
            if head is None or head.job_id in busy.job_ids or head.job_id in self._suspects:
                return True
            is_read_by_others = line in had_a_place or line[1] in busy.reading
            return line[0] == 0 and (line[1] in writing or (is_read_by_others and head.job_id not in self._readers))

        def has_no_turn(line: Line) -> bool:
            return line in had_a_place or is_barred(line)

        chosen: list[str] = []
        while len(chosen) < limit:
            in_turn = (self._n_served + len(chosen)) % 2 == 1
            found = (self._turns.next(has_no_turn, end) if in_turn else None) or self._heads.next(is_barred, end)
            if found is None:
                break
            entry, line = found
            chosen.append(entry.job_id)
            had_a_place.add(line)
            if entry.job_id in self._readers:
                self._pass(line)
            else:
                writing.add(line[1])
        self._put_back()
        return chosen

    def suspect(self) -> str | None:
        """The oldest suspect that waits for nothing but to be alone; it stays in the lineup."""
        unread = self._next_unlearned()
        end = inf if unread is None else unread.place
        ready = [(place, job_id) for job_id, place in self._suspects.items() if place < end and self._is_next(job_id)]
        return min(ready)[1] if ready else None

    def is_nearer_to_the_end(self, job_id: str) -> bool:
        """Of the queue, than to its front."""
        return 2 * self._places[job_id] > self._order[0].place + self._back

    def _pass(self, line: Line) -> None:
        """Let the next of a line come to its front, as long as this choice goes on."""
        self._passed[line] += 1
        if (head := self._head(line)) is not None:
            self._heads.add(head, line)

    def _put_back(self) -> None:
        passed = list(self._passed)
        self._passed.clear()
        self._heads.put_back()
        self._turns.put_back()
        for line in passed:  # its true head may have been taken for a stale one
            if (head := self._head(line)) is not None:
                self._heads.add(head, line)
                self._turns.add(head, line)

    def _line_of(self, job_id: str) -> Line:
        agent_id = self._agent_of.get(job_id)
        return (1, job_id) if agent_id is None else (0, agent_id)

    def _is_next(self, job_id: str) -> bool:
        """Whether none of its agent's jobs stands before it."""
        head = self._head(self._line_of(job_id))
        return head is not None and head.job_id == job_id

    def _next_unlearned(self) -> Entry | None:
        while self._unlearned and self._is_stale(self._unlearned[0]):
            self._unlearned.popleft()
        return self._unlearned[0] if self._unlearned else None

    def _head(self, key: Line) -> Entry | None:
        line = self._lines.get(key)
        while line and self._is_stale(line[0]):
            line.popleft()
        if not line:
            self._lines.pop(key, None)
            return None
        if not (n_passed := self._passed.get(key, 0)):
            return line[0]
        return next(islice((entry for entry in line if not self._is_stale(entry)), n_passed, None), None)

    def _is_stale(self, entry: Entry) -> bool:
        return self._places.get(entry.job_id) != entry.place
