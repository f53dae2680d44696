"""The rows that wait for a place in the batch, and which comes next. Pure; engine thread.

Oldest first. A row that does not fit now lets smaller ones pass, but only so many: then the batch drains until it fits,
so neither a large row nor a small one waits for ever.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Final

from stoker_worker.engine.row import Row

MOST_OVERTAKEN: Final = 32
"""Rows that may pass one that does not fit."""


class WaitingRows:
    """Rows in the order of their uids, which is the order they were submitted in; also those that were set aside."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._passed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def add(self, row: Row) -> None:
        insort(self._rows, row, key=lambda waiting: waiting.uid)

    def discard(self, row: Row) -> None:
        """Take out `row`, if it is here."""
        self._rows = [other for other in self._rows if other is not row]
        self._passed.pop(row.uid, None)

    def take(self, fits: Callable[[Row], bool]) -> Row | None:
        """Take out the row that comes next, if one does."""
        for row in self._rows:
            if fits(row):
                self.discard(row)
                for older in self._rows:
                    if older.uid < row.uid:
                        self._passed[older.uid] = self._passed.get(older.uid, 0) + 1
                return row
            if self._passed.get(row.uid, 0) >= MOST_OVERTAKEN:
                return None
        return None
