"""The waiting jobs of one queue: their order, and what is known of them. Fetcher thread.

`Lines` and `FairQueue` decide the order, without I/O: free places go alternately to the oldest job that may run, and to
the agent that was served longest ago. Each agent's jobs are a line: only its head can be chosen, so the cost of a
choice grows with the busy agents, not with the waiting jobs. Jobs that read may go together. A line is aside while
another worker has a job of the agent in flight, or has its cache. Of the next jobs in either order, one whose agent's
cache is at hand goes first; `PassedOver` bounds how long the others are passed over.

`QueueView` reads RQ's list once. After that, each look asks only for the ids that came in at either end, and for those
that other workers took. Ids stay in the list until they are claimed, so operators see its true length.
"""

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import chain, islice, takewhile, zip_longest
from math import inf
from typing import Any, Final, NamedTuple

from redis import Redis
from rq.job import Job
from rq.queue import Queue
from rq.suspension import WORKERS_SUSPENDED

from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.request import Access
from stoker_shared.wire import COUNTS_KEY, FIELD_AGENT, FIELD_ATTEMPTS, REQUEST_KWARG, TAKEN_KEY
from stoker_worker.periodic import Periodic
from stoker_worker.ports import UNUSED, Busy, MemoryUse
from stoker_worker.queue.client import lua
from stoker_worker.queue.json_job import raw, text

_PAGE: Final = 250
_MAX_IN_FRONT: Final = 1000  # with more new ids than that, the queue is read anew
_KNOWN: Final = (0, 1, 3, 7, 15, 31, 63, 127)  # places, from either end, of the ids that a look searches for
_READ_AT_ONCE: Final = 100
_AT_ONCE_BYTES: Final = 2**17  # compressed, in one reading: unpacking it holds up the thread
_READ_S: Final = 0.002  # for reading on, in a claim that has found jobs or has no room for any
_READ_WHEN_IDLE_S: Final = 0.02  # and in a claim that has room and has found none
_READING: Final = (Job.key_for(""), FIELD_AGENT, FIELD_ATTEMPTS, _AT_ONCE_BYTES, MAX_DATA_BYTES)
_MAX_GONE: Final = 32  # known jobs that are not in the list any more

MOST_PASSED: Final = 32
"""When this many places were given since a job was first passed over, it is passed over no more: a few batches, so that
a cache serves several turns while it is in RAM. Also, the most jobs that are looked at for one place."""

MOST_PASSED_S: Final = 10.0
"""The same in seconds, for long jobs: a person who waits for an answer should hardly notice it."""

_MOST_KEPT: Final = 1024


Known = tuple[MemoryUse, bool]
"""How a job uses memory, and whether it is quarantined."""

Line = str | tuple[str]
"""The name of a line: an agent's id, or a tuple of a job's id, because a job without memory has a line of its own."""


class Waiting(NamedTuple):
    """A waiting job. Sorts by its place in the queue, which no other job has."""

    place: int
    job_id: str
    use: MemoryUse = UNUSED
    quarantined: bool = False

    @property
    def line(self) -> Line:
        return (self.job_id,) if self.use.agent_id is None else self.use.agent_id


class Aside(NamedTuple):
    """Why a line is aside.

    Attributes:
        job_id: the line's head at that time.
        maker: the member that the line is left to; empty while a job of the agent is in flight elsewhere.
        until: when to try again, by the `Claimer`'s clock.
    """

    job_id: str
    maker: str
    until: float


class Lines:
    """The waiting jobs, by line.

    Attributes:
        heads: of all lines that are not aside, in queue order.
        turns: the agents' heads among these, each with the number of its agent's last place; sorted.
        aside: the agents whose lines are aside.
    """

    def __init__(self) -> None:
        self.heads: list[Waiting] = []
        self.turns: list[tuple[int, Waiting]] = []
        self.aside: dict[str, Aside] = {}
        self._lines: dict[Line, list[Waiting]] = {}
        self._served_at: dict[Line, int] = {}  # the number of its last place; missing for one that was never served
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
        """Note that the job's line got the place of this number."""
        line = self._take_out(job.line)
        self._served_at[job.line] = n_served
        self._put_in(job.line, line)

    def first_of(self, name: Line) -> Waiting | None:
        """The head of a line, also of one that is aside. Any thread."""
        return next(iter(self._lines.get(name, ())), None)

    def behind(self, job: Waiting) -> list[Waiting]:
        """The next job of the same line; empty if there is none."""
        line = self._lines[job.line]
        at = line.index(job) + 1
        return line[at : at + 1]

    def agents(self) -> frozenset[str]:
        """The agents of all lines that are not aside; the same object until they change."""
        if self._agents is None:
            self._agents = frozenset(name for name in self._lines if isinstance(name, str) and name not in self.aside)
        return self._agents

    def put_aside(self, agent_id: str, why: Aside) -> None:
        """Offer none of the agent's jobs until `take_back`."""
        line = self._take_out(agent_id)
        self._agents, self.aside[agent_id] = None, why
        if line:
            self._put_in(agent_id, line)

    def take_back(self, agents: Iterable[str]) -> None:
        """Offer the jobs of these agents, of which there may be very many, again."""
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


class PassedOver:
    """When each job was first passed over: after how many places, and at what time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[str, tuple[int, float]] = {}

    def note(self, job_ids: Iterable[str], n_given: int) -> None:
        """Note that these were passed over, after `n_given` places."""
        now = self._clock()
        for job_id in job_ids:
            self._first.setdefault(job_id, (n_given, now))
        while len(self._first) > _MOST_KEPT:  # the oldest ones are of jobs that left while the queue was read anew
            del self._first[next(iter(self._first))]

    def forget(self, job_id: str) -> None:
        self._first.pop(job_id, None)

    def for_long(self, job_id: str, n_given: int) -> bool:
        """True if the job may be passed over no more."""
        n_before, since = self._first.get(job_id, (n_given, self._clock()))
        return n_given - n_before >= MOST_PASSED or self._clock() - since >= MOST_PASSED_S


class FairQueue:
    """The order of the waiting jobs. A job can be chosen once `learn` has been called for it and for all before it.

    Attributes:
        is_at_hand: whether an agent's next job needs nothing of its cache from disk.
        lines: the learned jobs.
    """

    def __init__(self, is_at_hand: Callable[[str], bool], passed_over: PassedOver | None = None) -> None:
        self.is_at_hand = is_at_hand
        self._passed_over = passed_over or PassedOver()
        self._n_served = 0
        self.lines = Lines()
        self.clear()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def clear(self) -> None:
        """Forget all jobs, and which agents were served. How long jobs have been passed over stays known."""
        self._jobs: OrderedDict[str, Waiting] = OrderedDict()  # in queue order
        self._unlearned: OrderedDict[str, None] = OrderedDict()  # those of them whose use of memory is not known
        self.lines.clear()
        self._quarantined: set[str] = set()
        self._front, self._back = 0, 0

    def append(self, job_ids: Iterable[str]) -> None:
        """Add jobs at the end. A job that is here already moves there and has to be learned again."""
        for job_id in job_ids:
            self._add(job_id, self._back)
            self._back += 1

    def prepend(self, job_ids: Iterable[str]) -> None:
        """As `append`, at the front; `job_ids` is in queue order."""
        for job_id in reversed(list(job_ids)):
            self._front -= 1
            self._add(job_id, self._front)
            self._jobs.move_to_end(job_id, last=False)
            self._unlearned.move_to_end(job_id, last=False)

    def discard(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        self._quarantined.discard(job_id)
        if job is not None:
            self._passed_over.forget(job_id)
        if job_id in self._unlearned:
            del self._unlearned[job_id]
        elif job is not None:
            self.lines.remove(job)

    def serve(self, job_id: str) -> None:
        """Remove a chosen job that has been claimed (`choose` leaves it here). Its agent goes to the end of the
        turns."""
        self._n_served += 1
        self.lines.serve(self._jobs[job_id], self._n_served)
        self.discard(job_id)

    def place_of(self, agent_id: str) -> int | None:
        """The place of the agent's first learned job: the later, the larger; ``None``: it has none. Any thread."""
        head = self.lines.first_of(agent_id)
        return None if head is None else head.place

    def next_agents(self, limit: int) -> list[str]:
        """The agents of the next jobs, in about the order of `choose`: by age and by turn alternately. Of either order,
        it looks at `MOST_PASSED` heads at least, as `choose` does for one place."""
        most = max(limit, MOST_PASSED)
        by_age = (job.line for job in self._soon_first(islice(self.lines.heads, most), limit))
        by_turn = (job.line for job in self._soon_first((job for _, job in islice(self.lines.turns, most)), limit))
        both = chain.from_iterable(zip_longest(by_age, by_turn))
        return list(islice(dict.fromkeys(name for name in both if isinstance(name, str)), limit))

    def first(self, count: int) -> list[str]:
        """The first `count` jobs, in queue order."""
        return list(islice(self._jobs, count))

    def last(self, count: int) -> list[str]:
        """The last `count` jobs, the very last one first."""
        return list(islice(reversed(self._jobs), count))

    def is_nearer_to_the_end(self, job_id: str) -> bool:
        return 2 * self._jobs[job_id].place > next(iter(self._jobs.values())).place + self._back

    def unlearned(self, count: int) -> list[str]:
        """The first `count` jobs whose use of memory is not known."""
        return list(islice(self._unlearned, count))

    def learn(self, job_id: str, use: MemoryUse, *, quarantined: bool) -> None:
        """Note how a job uses memory; a quarantined job is never chosen. Does nothing for a job that is not waiting."""
        if job_id not in self._unlearned:
            return
        del self._unlearned[job_id]
        job = self._jobs[job_id] = self._jobs[job_id]._replace(use=use, quarantined=quarantined)
        if quarantined:
            self._quarantined.add(job_id)
        self.lines.add(job)

    def use_of(self, job_id: str) -> MemoryUse:
        """The learned memory use of a waiting job."""
        return self._jobs[job_id].use

    def learned(self) -> dict[str, Known]:
        """Every job that was learned, by its id."""
        jobs = self._jobs.items()
        return {job_id: (job.use, job.quarantined) for job_id, job in jobs if job_id not in self._unlearned}

    def choose(self, limit: int, busy: Busy) -> list[str]:
        """The next jobs, at most `limit`, that may run beside one another and beside what is busy. They stay here, and
        it is noted which jobs they pass.

        A job that uses no memory has its place in queue order, but no turn. A quarantined job is never among them, and
        neither are the jobs of its agent behind it; other agents' jobs pass it.
        """
        end = self._end()
        chosen: list[Waiting] = []
        followers: list[Waiting] = []  # the jobs behind chosen readers in their lines, in queue order

        def may_run(job: Waiting) -> bool:
            return not (job.quarantined or job.job_id in busy.job_ids or job in chosen or busy.bars(job.use))

        def oldest() -> Waiting | None:
            return first_at_hand(takewhile(lambda job: job.place < end, merge(self.lines.heads, followers)))

        def next_in_turn() -> Waiting | None:
            had_a_turn = {job.line for job in chosen}
            return first_at_hand(job for _, job in self.lines.turns if job.place < end and job.line not in had_a_turn)

        def first_at_hand(jobs: Iterable[Waiting]) -> Waiting | None:
            passed: list[Waiting] = []
            for job in islice(filter(may_run, jobs), MOST_PASSED):
                if self._goes_now(job, n_given):
                    self._passed_over.note((other.job_id for other in passed), n_given)
                    return job
                passed.append(job)
            return passed[0] if passed else None

        while len(chosen) < limit:
            n_given = self._n_served + len(chosen)
            is_a_turn = n_given % 2 == 1
            job = (next_in_turn() if is_a_turn else None) or oldest()
            if job is None:
                break
            chosen.append(job)
            busy = busy.beside([job.use])
            if job.use.access == "read":
                followers = sorted([*followers, *self.lines.behind(job)])
        return [job.job_id for job in chosen]

    def next_quarantined(self, busy: Busy) -> str | None:
        """The oldest quarantined job that may run beside what is busy, and waits for nothing but to be alone."""
        lines, jobs = self.lines, map(self._jobs.__getitem__, self._quarantined - busy.job_ids)
        here = [job for job in jobs if job.line not in lines.aside and not busy.bars(job.use)]
        ready = [job for job in here if job.place < self._end() and lines.first_of(job.line) is job]
        return min(ready).job_id if ready else None

    def _goes_now(self, job: Waiting, n_given: int) -> bool:
        """True if the job is not passed over, after `n_given` places."""
        agent_id = job.use.agent_id
        return agent_id is None or self.is_at_hand(agent_id) or self._passed_over.for_long(job.job_id, n_given)

    def _soon_first(self, jobs: Iterable[Waiting], n_places: int) -> list[Waiting]:
        """Sorted: first the jobs that are not passed over any more after `n_places` more places, then the others."""
        return sorted(jobs, key=lambda job: not self._goes_now(job, self._n_served + n_places))

    def _end(self) -> float:
        """The place of the first job that was not learned. No job behind it can be chosen."""
        first = next(iter(self._unlearned), None)
        return inf if first is None else self._jobs[first].place

    def _add(self, job_id: str, place: int) -> None:
        self.discard(job_id)
        self._jobs[job_id] = Waiting(place, job_id)
        self._unlearned[job_id] = None


class QueueView:
    """RQ's list of one queue, as it was last seen.

    Attributes:
        waiting: its jobs, in the order in which they are served.
        is_suspended: whether an operator had suspended the workers then.
    """

    def __init__(
        self, connection: Redis, queue_name: str, is_at_hand: Callable[[str], bool], *, is_shared: bool = True
    ) -> None:
        """
        Args:
            is_at_hand: as in `FairQueue`.
            is_shared: whether other workers take jobs from the queue.
        """
        news = [TAKEN_KEY.format(queue=queue_name), COUNTS_KEY.format(queue=queue_name)]
        self._look_keys = [Queue(queue_name, connection=connection).key, *news, WORKERS_SUSPENDED]
        self.is_suspended = False
        self._is_shared = is_shared
        self._look_at = connection.register_script(lua("read", "look"))
        self._read_at = connection.register_script(lua("read") + "return read({unpack(ARGV, 6)})")
        self.waiting = FairQueue(is_at_hand)
        self._known: dict[str, Known] = {}  # of jobs that are to be learned by `waiting`
        self._may_start_over = Periodic(5.0)
        self._is_whole = True
        self._n_taken = 0

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """Look for jobs that came in, and read how they use memory until a claim of `limit` jobs would find enough.

        Fairness can only be judged among jobs that were read, so this reads a little further even when it has found
        enough, or `limit` is 0.
        """
        self._look()
        begin = time.perf_counter()
        while self._learn():
            n_chosen = len(self.waiting.choose(limit, busy))
            read_s = _READ_WHEN_IDLE_S if limit and not n_chosen else _READ_S
            if 0 < limit == n_chosen or time.perf_counter() > begin + read_s:
                return

    @property
    def has_unread(self) -> bool:
        """True if `read_ahead` stopped before it knew all waiting jobs."""
        return not self._is_whole or bool(self.waiting.unlearned(1))

    def correct(self, job_id: str, use: MemoryUse, *, quarantined: bool) -> None:
        """Note the real memory use of a claimed job that goes back to the queue, because it was read differently."""
        self._known[job_id] = (use, quarantined)

    def _look(self) -> None:
        """Take in the ids that came in at either end since the last look, a page at a time, and those taken since."""
        for _ in range(2):
            first, last = self.waiting.first(_KNOWN[-1] + 1), self.waiting.last(_KNOWN[-1] + 1)
            anchors, ends = ([known[at] for at in _KNOWN if at < len(known)] for known in (first, last))
            n_taken_seen = self._n_taken if self._is_shared else ""
            args: list[Any] = [*_READING, _PAGE, _MAX_IN_FRONT, n_taken_seen, _READ_AT_ONCE, len(anchors)]
            args += [*map(raw, anchors), *map(raw, ends)]
            reply = self._look_at(keys=self._look_keys, args=args)
            length, anchor, before, behind, taken, n_taken, suspended, found = reply
            self.is_suspended = suspended == 1
            knows_taken = 0 <= n_taken - self._n_taken <= len(taken)
            self._n_taken = n_taken
            for job_id in filter(self.waiting.__contains__, map(text, taken)):
                self.waiting.discard(job_id)
                self._known.pop(job_id, None)  # if it comes back, its worker may have been lost with it
            if not anchor:
                self._start_over()
            if not knows_taken:  # a job may have been taken, and be back because its worker was lost
                self._known.clear()
            # Ids that were taken and are back already are new ones at the front.
            known_before = [job_id for job_id in first[: _KNOWN[anchor - 1] if anchor else 0] if job_id in self.waiting]
            self.waiting.prepend(self._arriving(_without_known(before, known_before)))
            self.waiting.append(self._arriving(behind))
            self._note([text(job_id) for job_id in (*before, *behind)], found)
            self._is_whole = len(behind) < _PAGE
            if self._is_whole and self._known:
                self._known = {job_id: known for job_id, known in self._known.items() if job_id in self.waiting}
            # Ids were removed from, or put into, the middle of the list. An id that is in it twice looks alike.
            n_unknown = length - len(self.waiting)
            is_wrong = n_unknown < -_MAX_GONE or (n_unknown > 0 and self._may_start_over.is_due())
            if not (self._is_whole and is_wrong):
                return
            self._start_over()

    def _start_over(self) -> None:
        self._known |= self.waiting.learned()
        self.waiting.clear()

    def _arriving(self, found: Sequence[bytes]) -> list[str]:
        """The ids that came in. Nothing is known of one that was here already: it may be another job by now."""
        job_ids = [text(job_id) for job_id in found]
        for job_id in job_ids:
            if job_id in self.waiting:
                self._known.pop(job_id, None)
        return job_ids

    def _learn(self) -> bool:
        """Find out how the next jobs use memory; ``False`` when all are learned."""
        job_ids = self.waiting.unlearned(_READ_AT_ONCE)
        if not job_ids and not self._is_whole:
            self._look()
            job_ids = self.waiting.unlearned(_READ_AT_ONCE)
        if unknown := [job_id for job_id in job_ids if job_id not in self._known]:
            self._note(unknown, self._read_at(args=[*_READING, *map(raw, unknown)]))
        for job_id in job_ids:
            if job_id not in self._known:  # the data of those before it was too large to read more
                break
            use, quarantined = self._known.pop(job_id)
            self.waiting.learn(job_id, use, quarantined=quarantined)
        return bool(job_ids)

    def _note(self, job_ids: Sequence[str], found: Sequence[Any]) -> None:
        """Note what was read of the first of these jobs."""
        with_data, quarantined = frozenset(found[1]), frozenset(found[2])
        for number, (job_id, value) in enumerate(zip(job_ids, found[0], strict=False), start=1):
            use = use_in(value) if number in with_data else use_noted(value)
            # `correct` knows a job that went back better.
            self._known.setdefault(job_id, (use, number in quarantined))


def _without_known(before: Sequence[bytes], known: Sequence[str]) -> list[bytes]:
    """The ids that came in: those before a known id, without the known ones that are still in front of it."""
    left, older = list(before), iter(reversed(known))
    while left and any(text(left[-1]) == job_id for job_id in older):
        left.pop()
    return left


def use_in(data: bytes | None) -> MemoryUse:
    """The memory use of a job with this stored `data`; `UNUSED` if it cannot be read."""
    try:
        request = read_json(unpacked(data or b""), MAX_DATA_BYTES)[3][REQUEST_KWARG]
        agent_id, cache, action = (request.get(name) for name in ("agent_id", "cache", "action"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return UNUSED
    access: Access = "none" if cache == "off" else "read" if cache == "read" or action == "info" else "write"
    return MemoryUse.of(access, agent_id if isinstance(agent_id, str) else None)


def use_noted(note: bytes) -> MemoryUse:
    """The memory use from the end of `FIELD_AGENT`, in one of the forms that `read.lua` lets pass."""
    word, _, agent_id = note.decode(errors="replace").partition(" ")
    access: Access = "read" if word == "read" else "write"
    return MemoryUse(access, agent_id) if agent_id else UNUSED
