"""Which decoding row lies in which group. Engine thread.

Owns the choice of a row's group and the order of all rows: group by group. Their keys and values are `RowGroup`'s.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.rows.room import MOST_SHARED_TOKENS
from stoker_worker.engine.rows.row import Row
from stoker_worker.engine.rows.row_group import RowGroup
from stoker_worker.engine.rows.shared_prefix import SharedPrefix

Placing = tuple[Row, list[KVCache]]
"""A row, and its own caches of full attention, which become its group's."""


class RowGroups:
    """
    Attributes:
        groups: in the order of a pass's inputs; always the same list.
        rows: of each group.
    """

    def __init__(self) -> None:
        self.groups: list[RowGroup] = []
        self.rows: list[list[Row]] = []

    @property
    def prefixes(self) -> list[SharedPrefix | None]:
        return [group.prefix for group in self.groups]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' own keys and values, without their prefixes."""
        return sum(group.nbytes for group in self.groups)

    def order(self) -> list[Row]:
        return [row for rows in self.rows for row in rows]

    def place(self, placings: Iterable[Placing]) -> None:
        """Put each row into a group; one that fits into none founds one."""
        joining: dict[int, list[Placing]] = {}
        for row, caches in sorted(placings, key=lambda placing: placing[0].n_own):
            number = self._fitting(row)
            if number is None:
                self._found(row, caches, row.prefix)
            else:
                joining.setdefault(number, []).append((row, caches))
        for number, together in joining.items():
            n_left = max(row.n_left for row, _ in together) + 1
            self.groups[number].add([caches for _, caches in together], n_left)
            self.rows[number] += [row for row, _ in together]

    def _fitting(self, row: Row) -> int | None:
        if row.n_own > MOST_SHARED_TOKENS:
            return None
        fitting = (i for i, group in enumerate(self.groups) if group.prefix == row.prefix and group.takes(row.n_own))
        return next(fitting, None)

    def _found(self, row: Row, caches: list[KVCache], prefix: SharedPrefix | None) -> None:
        self.groups.append(RowGroup(caches, row.n_left + 1, prefix))
        self.rows.append([row])

    def remove(self, leaving: Sequence[Row]) -> None:
        for number in reversed(range(len(self.groups))):
            group, rows = self.groups[number], self.rows[number]
            gone = [row for row in leaving if row in rows]
            if len(gone) == len(rows):
                del self.groups[number], self.rows[number]
                continue
            for row in gone:
                self._take_out(number, row)
            group.shrink()

    def set_apart(self, apart: Iterable[Row]) -> None:
        """Give rows groups of their own: a draft is written to one row, and taken back from it."""
        for row in apart:
            number = self._number(row)
            group, rows = self.groups[number], self.rows[number]
            if len(rows) > 1:
                caches = group.row(rows.index(row))
                mx.eval([cache.state for cache in caches])  # or the group could not be updated in place
                self._take_out(number, row)
                group.shrink()
                self._found(row, caches, group.prefix)

    def dissolve_outgrown(self) -> None:
        """Set all rows of a group apart that has become too long; of one group at most."""
        for number, group in enumerate(self.groups):
            if group.is_outgrown:
                rows = self.rows[number]
                self.groups[number : number + 1] = [
                    RowGroup(group.row(i), row.n_left + 1, group.prefix) for i, row in enumerate(rows)
                ]
                self.rows[number : number + 1] = [[row] for row in rows]
                return

    def own(self, row: Row) -> list[KVCache]:
        """A row's caches after its prefix, as `RowGroup.row`."""
        number = self._number(row)
        return self.groups[number].row(self.rows[number].index(row))

    def trim(self, row: Row, n_tokens: int) -> None:
        """Take back the newest tokens of a row that was set apart."""
        self.groups[self._number(row)].trim(n_tokens)

    def _number(self, row: Row) -> int:
        return next(number for number, rows in enumerate(self.rows) if row in rows)

    def _take_out(self, number: int, row: Row) -> None:
        """The last row of the group takes its place."""
        rows = self.rows[number]
        index = rows.index(row)
        rows[index] = rows[-1]
        rows.pop()
        self.groups[number].remove(index)
