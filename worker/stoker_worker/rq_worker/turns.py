"""Whose turn it is: the agent that was served longest ago. Pure policy, no I/O; inbox thread.

Owns who was served when, of agents that have jobs waiting; whoever else comes is new, and before all of these. Finding
out costs the number of busy agents.
"""

from collections import OrderedDict
from collections.abc import Callable

from stoker_worker.rq_worker.heads import Entry, Heads, Line


class Turns:
    """The lines of agents, those that were never served first, in queue order; then by when they were."""

    def __init__(self, head_of: Callable[[Line], Entry | None]) -> None:
        self._head_of = head_of
        self._served: OrderedDict[Line, None] = OrderedDict()  # longest ago first
        self._new = Heads(lambda line: None if line in self._served else head_of(line))

    def add(self, head: Entry, line: Line) -> None:
        """A line has a head that is older than the one it had."""
        if line not in self._served:
            self._new.add(head, line)

    def next(self, is_barred: Callable[[Line], bool], end: float) -> tuple[Entry, Line] | None:
        """The head of the line whose turn it is, of those not barred; none when its place is not before `end`."""
        if (found := self._new.next(is_barred, end)) is not None:
            return found
        line = next((line for line in self._served if not is_barred(line)), None)
        head = None if line is None else self._head_of(line)
        return None if line is None or head is None or head.place >= end else (head, line)

    def put_back(self) -> None:
        self._new.put_back()

    def serve(self, line: Line) -> None:
        """A line that goes on has had a place."""
        self._served[line] = None
        self._served.move_to_end(line)

    def forget(self, line: Line) -> None:
        """A line that has nobody left."""
        self._served.pop(line, None)
