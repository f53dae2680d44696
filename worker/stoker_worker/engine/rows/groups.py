"""Keys and values of decoding rows, and the groups in which the rows lie. Engine thread.

Rows of similar length share one array per layer. All rows of a group end at the same place, so a step writes all their
new tokens with one update; a shorter row begins later. A long row is alone in its group and keeps the arrays that it
came with, so nothing is copied when it joins or leaves.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.kv_memory import GROW_STEPS, MOST_APART, MOST_SHARED_TOKENS, SPARE_SHARE, room_for
from stoker_worker.engine.rows.row import Row
from stoker_worker.engine.rows.shared_prefix import SharedPrefix

Placing = tuple[Row, list[KVCache]]
"""A row, and its own caches of every full-attention layer, which become its group's."""


class RowGroup:
    """Rows that share arrays.

    Attributes:
        prefix: the tokens that all rows begin with; all else here is about their tokens after it.
        lengths: tokens of each row.
        mask: which of a step's tokens each row has, (rows, 1, 1, tokens); ``None`` if each row has all.
    """

    def __init__(self, row: Row, caches: Sequence[KVCache]) -> None:
        """The arrays of `caches`, the row's, become the group's."""
        # Per layer (places, n_kv_heads, room, dim); row i has the tokens [end - lengths[i], end).
        self._keys: list[mx.array] = [cache.keys for cache in caches]
        self._values: list[mx.array] = [cache.values for cache in caches]
        self._end = int(caches[0].offset)
        self._most = self._end + row.n_left + 1  # tokens of the longest row at its end
        self.rows = [row]
        self.prefix = row.prefix
        self.lengths = [self._end]
        self.mask: mx.array | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in (*self._keys, *self._values))

    @property
    def n_shared(self) -> int:
        return 0 if self.prefix is None else self.prefix.n_tokens

    def takes(self, n_tokens: int) -> bool:
        """True if a row of this length may join."""
        longest, shortest = max(n_tokens, *self.lengths), min(n_tokens, *self.lengths)
        return longest <= MOST_SHARED_TOKENS and longest - shortest <= MOST_APART

    def add(self, placings: Sequence[Placing]) -> None:
        """Copy rows into the group, after those that are there. Their caches are emptied, a layer at a time, so that
        nearly nothing is in memory twice."""
        of_rows = [caches for _, caches in placings]
        n_left = max(row.n_left for row, _ in placings) + 1
        lengths = [int(caches[0].offset) for caches in of_rows]
        longest, n_rows = max(*self.lengths, *lengths), len(self) + len(placings)
        self._most = max(self._most, max(lengths) + n_left)
        if n_rows > self._places or longest > self._end:
            spare = n_rows // SPARE_SHARE if self._places > 1 else 0  # rows that come together may leave together
            self._rebuild(n_rows + spare, longest, n_left)
        else:  # what earlier rows left in these places is masked, but zero times infinity would not be zero
            for values in self._values:
                values[len(self) : n_rows] = 0
        of_layers = zip(self._keys, self._values, zip(*of_rows, strict=True), strict=True)
        for keys, values, caches in of_layers:
            for place, (cache, length) in enumerate(zip(caches, lengths, strict=True), len(self)):
                at = (slice(place, place + 1), slice(None), slice(self._end - length, self._end))
                keys[at], values[at] = cache.keys[..., :length, :], cache.values[..., :length, :]
                cache.keys = cache.values = None
            mx.eval(keys, values)
        self.lengths += lengths
        self.rows += [row for row, _ in placings]

    def remove(self, row: Row) -> None:
        """Take a row out; the last row takes its place. Call `shrink` after the last removal of a step."""
        index, last = self.rows.index(row), len(self) - 1
        if index != last:
            for array in (*self._keys, *self._values):  # the whole place, so that nothing of the leaving row stays
                array[index : index + 1, :, : self._end] = self._copy(array, last, 0)
            self.lengths[index], self.rows[index] = self.lengths[last], self.rows[last]
        self.lengths.pop()
        self.rows.pop()

    def shrink(self) -> None:
        """Free spare places if there are too many."""
        if self._places > len(self) + len(self) // SPARE_SHARE:
            self._rebuild(len(self), max(self.lengths), 0)

    def own(self, row: Row) -> list[KVCache]:
        """A row's caches after its prefix: the group's arrays if it is alone, else copies, not yet evaluated."""
        index = self.rows.index(row)
        start, caches = self._end - self.lengths[index], []
        for keys, values in zip(self._keys, self._values, strict=True):
            cache = KVCache()
            if self._places == 1 and start == 0:
                cache.keys, cache.values = keys, values
            else:
                cache.keys, cache.values = self._copy(keys, index, start), self._copy(values, index, start)
            cache.offset = self.lengths[index]
            caches.append(cache)
        return caches

    # --- a step ---

    @property
    def is_outgrown(self) -> bool:
        """True if the rows are too long by now to share arrays."""
        return len(self) > 1 and max(self.lengths) >= 2 * MOST_SHARED_TOKENS

    def begin_step(self, n_tokens: int = 1) -> None:
        """Make room for one more token of each row, or for several of a row alone."""
        longest = max(self.lengths)
        if self._places == 1:
            self._grow(n_tokens)
        elif self._end == int(self._keys[0].shape[2]):
            self._rebuild(self._places, longest, longest)
        self._end += n_tokens
        self.lengths = [length + n_tokens for length in self.lengths]
        if min(self.lengths) > longest:
            self.mask = None
        else:
            missing = mx.array([longest + 1 - length for length in self.lengths])
            self.mask = (mx.arange(longest + 1) >= missing[:, None])[:, None, None, :]

    def put(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the newest tokens of each row, (rows, n_kv_heads, tokens, dim); returns all tokens of all rows."""
        n, end = len(self), self._end
        start = end - keys.shape[2]
        self._keys[layer][:n, :, start:end] = keys
        self._values[layer][:n, :, start:end] = values
        return self.keys_and_values(layer)

    def trim(self, n_tokens: int) -> None:
        """Take back the newest tokens of a row alone."""
        self._end -= n_tokens
        self.lengths[0] -= n_tokens

    def keys_and_values(self, layer: int) -> tuple[mx.array, mx.array]:
        """All tokens of all rows."""
        n, start, end = len(self), self._end - max(self.lengths), self._end
        return self._keys[layer][:n, :, start:end], self._values[layer][:n, :, start:end]

    # --- storage ---

    @property
    def _places(self) -> int:
        return int(self._keys[0].shape[0])

    def _copy(self, array: mx.array, index: int, start: int) -> mx.array:
        # A slice of one row would share the array's memory, and MLX updates no array in place whose memory is shared.
        return mx.take(array[:, :, start : self._end], mx.array([index]), axis=0)

    def _grow(self, n_tokens: int) -> None:
        """Enlarge the arrays of a row alone, a few layers in each of its last steps, so that no step is long."""
        for arrays in (self._keys, self._values):
            for layer, array in enumerate(arrays):
                room = int(array.shape[2])
                if room - self._end < n_tokens + layer % GROW_STEPS and room < self._most:
                    larger = room_for(self._end + 1, self._most - self._end, is_shared=False)
                    fresh = mx.zeros((1, array.shape[1], larger, array.shape[3]), array.dtype)
                    fresh[:, :, : self._end] = array[:, :, : self._end]
                    arrays[layer] = fresh

    def _rebuild(self, places: int, longest: int, n_left: int) -> None:
        """Move the rows into new arrays, whose longest row may have `longest` tokens and grow by `n_left`."""
        n, mine = len(self), max(self.lengths)
        room = room_for(longest + 1, n_left, is_shared=places > 1)
        for arrays in (self._keys, self._values):
            for layer, array in enumerate(arrays):
                fresh = mx.zeros((places, array.shape[1], room, array.shape[3]), array.dtype)
                fresh[:n, :, longest - mine : longest] = array[:n, :, self._end - mine : self._end]
                arrays[layer] = fresh
        self._end = longest


class RowGroups:
    """All groups. `groups` is in the order of a pass's inputs, and always the same list."""

    def __init__(self) -> None:
        self.groups: list[RowGroup] = []

    @property
    def prefixes(self) -> list[SharedPrefix | None]:
        return [group.prefix for group in self.groups]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' own keys and values, without their prefixes."""
        return sum(group.nbytes for group in self.groups)

    def order(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    def of(self, row: Row) -> RowGroup:
        return next(group for group in self.groups if row in group.rows)

    def place(self, placings: Iterable[Placing]) -> None:
        """Put each row into a group; one that fits into none gets a new one."""
        joining: dict[RowGroup, list[Placing]] = {}
        for row, caches in sorted(placings, key=lambda placing: placing[0].n_own):
            fitting = (group for group in self.groups if group.prefix == row.prefix and group.takes(row.n_own))
            if (group := next(fitting, None)) is None:
                self.groups.append(RowGroup(row, caches))
            else:
                joining.setdefault(group, []).append((row, caches))
        for group, together in joining.items():
            group.add(together)

    def remove(self, leaving: Sequence[Row]) -> None:
        for group in [*self.groups]:
            gone = [row for row in leaving if row in group.rows]
            if len(gone) == len(group):
                self.groups.remove(group)
                continue
            for row in gone:
                group.remove(row)
            group.shrink()

    def set_apart(self, apart: Iterable[Row]) -> None:
        """Give rows groups of their own: a draft is written to one row, and taken back from it."""
        for row in apart:
            group = self.of(row)
            if len(group) > 1:
                caches = group.own(row)
                mx.eval([cache.state for cache in caches])  # or the group could not be updated in place
                group.remove(row)
                group.shrink()
                self.groups.append(RowGroup(row, caches))

    def dissolve_outgrown(self) -> None:
        """Set all rows apart of a group that has become too long; of one group at most."""
        for number, group in enumerate(self.groups):
            if group.is_outgrown:
                self.groups[number : number + 1] = [RowGroup(row, group.own(row)) for row in group.rows]
                return

    def trim(self, row: Row, n_tokens: int) -> None:
        self.of(row).trim(n_tokens)
