"""The caches that a model sees in a pass over several rows: one object a layer. Engine thread.

They have the part of mlx-lm's cache protocol that models use: `offset`, `make_mask` and `update_and_fetch`. They own
no keys and values: `StepCache` serves a step of the decoding rows' groups, `ChunkCache` some prompt tokens of rows that
keep mlx-lm's own caches.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.rows.attention import Part, RowsKV
from stoker_worker.engine.rows.row_group import RowGroup
from stoker_worker.engine.rows.shared_prefix import SharedPrefix


class _LayerCache:
    def make_mask(self, n_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: `Part` has each row's.

        Raises:
            ValueError: the model wants a window of what its cache keeps; it cannot be served in rows.
        """
        if window_size is not None or n_tokens != 1:
            raise ValueError("the model asks for a mask over all rows")


class Step:
    """What the layers of one step have in common.

    Attributes:
        groups: all decoding rows, in the order of the pass's inputs.
        offset: the place of each input in its row, (inputs,), or one number for all.
        parts: the groups' places in the pass.
    """

    def __init__(self, groups: list[RowGroup]) -> None:
        self.groups = groups
        self.offset: Any = None
        self.parts: list[Part] = []

    def begin(self, sizes: Sequence[int]) -> None:
        """
        Args:
            sizes: inputs of each row of a group; more than one only of a row alone.
        """
        places = [
            group.n_shared + length + i
            for group, size in zip(self.groups, sizes, strict=True)
            for length in group.lengths
            for i in range(size)
        ]
        self.offset = places[0] if len(set(places)) == 1 else mx.array(places)
        self.parts = []
        first = 0
        for group, size in zip(self.groups, sizes, strict=True):
            group.begin_step(size)
            last = first + size * len(group)
            is_chunk = size > 1
            self.parts.append(Part(first, last, "causal" if is_chunk else group.mask, is_chunk=is_chunk))
            first = last


class StepCache(_LayerCache):
    """One layer of all decoding rows; an input is a row's next token, or a draft of one after it."""

    def __init__(self, step: Step, layer: int) -> None:
        self._step = step
        self._layer = layer

    @property
    def offset(self) -> Any:
        return self._step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsKV, RowsKV]:
        """
        Args:
            keys, values: (inputs, n_kv_heads, 1, dim).
        """
        arrays = [
            group.put(self._layer, *(_of_part(array, part) for array in (keys, values)))
            for group, part in zip(self._step.groups, self._step.parts, strict=True)
        ]
        return self._rows_kv(arrays)

    def keys_and_values(self) -> tuple[RowsKV, RowsKV]:
        return self._rows_kv([group.keys_and_values(self._layer) for group in self._step.groups])

    def _rows_kv(self, arrays: list[tuple[mx.array, mx.array]]) -> tuple[RowsKV, RowsKV]:
        prefixes: list[tuple[mx.array, mx.array] | tuple[None, None]] = []
        for i, (group, part) in enumerate(zip(self._step.groups, self._step.parts, strict=True)):
            if group.prefix is None or part.is_chunk:
                prefixes.append((None, None))
            else:
                prefixes.append(group.prefix.layer(self._layer))
            if group.prefix is not None and part.is_chunk:
                arrays[i] = group.prefix.before(self._layer, arrays[i])
        return _rows_kv(self._step.parts, arrays, prefixes)


class ChunkCache(_LayerCache):
    """One layer of some rows in prefill; an input is one token of one row, and a row's inputs follow each other."""

    def __init__(
        self,
        caches: Sequence[KVCache],
        sizes: Sequence[int],
        offset: mx.array,
        prefixes: Sequence[SharedPrefix | None],
        layer: int,
    ) -> None:
        """
        Args:
            sizes: inputs of each row.
            offset: the place of each input in its row, (inputs,).
            prefixes: what comes before each row's cache.
        """
        self.offset = offset
        self._caches = caches
        self._sizes = sizes
        self._prefixes = prefixes
        self._layer = layer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsKV, RowsKV]:
        """
        Args:
            keys, values: (inputs, n_kv_heads, 1, dim).
        """
        first = 0
        for cache, size in zip(self._caches, self._sizes, strict=True):
            last = first + size
            # A row's inputs become the tokens of one sequence: (1, n_kv_heads, size, dim).
            cache.update_and_fetch(*(array[first:last].transpose(2, 1, 0, 3) for array in (keys, values)))
            first = last
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[RowsKV, RowsKV]:
        parts, first = [], 0
        for size in self._sizes:
            parts.append(Part(first, first + size, "causal" if size > 1 else None, is_chunk=True))
            first += size
        # A chunk has so many queries that copying a layer's prefix for it costs little.
        arrays = [
            own if prefix is None else prefix.before(self._layer, own)
            for prefix, own in zip(self._prefixes, (cache.keys_and_values() for cache in self._caches), strict=True)
        ]
        return _rows_kv(parts, arrays, [(None, None) for _ in parts])


def _of_part(array: mx.array, part: Part) -> mx.array:
    """A part's inputs; those of a chunk become the tokens of one sequence."""
    array = array[part.first : part.last]
    return array.transpose(2, 1, 0, 3) if part.is_chunk else array


def _rows_kv(
    parts: list[Part],
    arrays: list[tuple[mx.array, mx.array]],
    prefixes: Sequence[tuple[mx.array, mx.array] | tuple[None, None]],
) -> tuple[RowsKV, RowsKV]:
    (keys, values), (first_keys, first_values) = zip(*arrays, strict=True), zip(*prefixes, strict=True)
    return RowsKV(parts, list(keys), list(first_keys)), RowsKV(parts, list(values), list(first_values))
