"""The heads of lines in queue order, found in a heap. Pure policy, no I/O; inbox thread.

Owns no line: it is told of each new head, and asks what a line's head is when an entry comes to light. So a job that
leaves a line costs nothing here.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple


class Entry(NamedTuple):
    place: int
    job_id: str


Line = tuple[int, str]
"""(0, agent id), or (1, job id) for a job that uses no agent's memory: it waits for none."""


class Heads:
    """Yields the oldest head of a free line, again and again; what came to light comes back with `put_back`."""

    def __init__(self, head_of: Callable[[Line], Entry | None]) -> None:
        """
        Args:
            head_of: a line's head, ``None`` when it has none or is not to be here.
        """
        self._head_of = head_of
        self._heap: list[tuple[Entry, Line]] = []
        self._aside: dict[Entry, Line] = {}

    def add(self, head: Entry, line: Line) -> None:
        """A line has a head that is older than the one it had."""
        heappush(self._heap, (head, line))

    def next(self, is_barred: Callable[[Line], bool], end: float) -> tuple[Entry, Line] | None:
        """The oldest head of a line that is not barred, in a place before `end`."""
        while self._heap and self._heap[0][0].place < end:
            entry, line = heappop(self._heap)
            head = self._head_of(line)
            if head is None or head.place < entry.place or entry in self._aside:  # the head has an entry of its own
                continue
            if head.place > entry.place:
                heappush(self._heap, (head, line))
                continue
            self._aside[entry] = line
            if not is_barred(line):
                return entry, line
        return None

    def put_back(self) -> None:
        for entry, line in self._aside.items():
            heappush(self._heap, (entry, line))
        self._aside.clear()
