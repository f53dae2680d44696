"""The caches that a model sees in a pass over several rows: one object a layer. Engine thread.

They have the part of mlx-lm's cache protocol that models use: `offset`, `make_mask` and `update_and_fetch`. They own
no keys and values: `StepCache` serves a step of the decoding rows' groups, `ChunkCache` some prompt tokens of rows that
keep mlx-lm's own caches.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.rows.attention import Part, RowsKV
from stoker_worker.engine.rows.row_group import RowGroup


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
        offset: tokens of each row before the step, (rows,), or one number for all.
        parts: the groups' places in the pass.
    """

    def __init__(self, groups: list[RowGroup]) -> None:
        self.groups = groups
        self.offset: Any = None
        self.parts: list[Part] = []

    def begin(self) -> None:
        lengths = [length for group in self.groups for length in group.lengths]
        self.offset = lengths[0] if len(set(lengths)) == 1 else mx.array(lengths)
        for group in self.groups:
            group.begin_step()
        ends = list(accumulate(map(len, self.groups)))
        self.parts = [
            Part(end - len(group), end, group.mask, is_chunk=False)
            for group, end in zip(self.groups, ends, strict=True)
        ]


class StepCache(_LayerCache):
    """One layer of all decoding rows; an input is a row's next token."""

    def __init__(self, step: Step, layer: int) -> None:
        self._step = step
        self._layer = layer

    @property
    def offset(self) -> Any:
        return self._step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsKV, RowsKV]:
        """
        Args:
            keys, values: (rows, n_kv_heads, 1, dim).
        """
        arrays = [
            group.put(self._layer, keys[part.first : part.last], values[part.first : part.last])
            for group, part in zip(self._step.groups, self._step.parts, strict=True)
        ]
        return _rows_kv(self._step.parts, arrays)

    def keys_and_values(self) -> tuple[RowsKV, RowsKV]:
        return _rows_kv(self._step.parts, [group.keys_and_values(self._layer) for group in self._step.groups])


class ChunkCache(_LayerCache):
    """One layer of some rows in prefill; an input is one token of one row, and a row's inputs follow each other."""

    def __init__(self, caches: Sequence[KVCache], sizes: Sequence[int], offset: mx.array) -> None:
        """
        Args:
            sizes: inputs of each row.
            offset: the place of each input in its row, (inputs,).
        """
        self.offset = offset
        self._caches = caches
        self._sizes = sizes

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
        return _rows_kv(parts, [cache.keys_and_values() for cache in self._caches])


def _rows_kv(parts: list[Part], arrays: list[tuple[mx.array, mx.array]]) -> tuple[RowsKV, RowsKV]:
    keys, values = zip(*arrays, strict=True)
    return RowsKV(parts, list(keys)), RowsKV(parts, list(values))
