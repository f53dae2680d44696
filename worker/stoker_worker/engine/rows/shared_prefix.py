"""The first tokens of several rows, in memory once. Engine thread.

Owns their keys and values, which never change and live as long as a row refers to them. Each row's own arrays begin
after them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_worker.models.cache_probe import leaves, nested


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """Keys and values of every layer, (1, n_kv_heads, n_tokens, dim)."""

    keys: list[mx.array]
    values: list[mx.array]
    n_tokens: int

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in (*self.keys, *self.values))


@dataclass(frozen=True)
class SharedPrefix:
    """The first `n_tokens` tokens of `stored`, which may have more."""

    stored: StoredPrefix
    n_tokens: int

    def layer(self, index: int) -> tuple[mx.array, mx.array]:
        """Keys and values of a layer, (1, n_kv_heads, n_tokens, dim)."""
        n = self.n_tokens
        return self.stored.keys[index][:, :, :n], self.stored.values[index][:, :, :n]

    def before(self, index: int, own: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
        """Keys and values of a layer of one row from its first token on, lazily; `own` are those after the prefix."""
        (first_keys, first_values), (keys, values) = self.layer(index), own
        return mx.concatenate([first_keys, keys], axis=2), mx.concatenate([first_values, values], axis=2)

    def whole(self, caches: Sequence[KVCache]) -> list[KVCache]:
        """A row's caches from its first token on, lazily, from `caches` of its tokens after the prefix."""
        joined = []
        for index, cache in enumerate(caches):
            both = KVCache()
            both.keys, both.values = self.before(index, cache.keys_and_values())
            both.offset = self.n_tokens + cache.offset
            joined.append(both)
        return joined


def split(caches: Any, n_tokens: int) -> tuple[SharedPrefix, Any]:
    """Copy a row's first `n_tokens` tokens and the ones after them apart, a layer at a time.

    Args:
        caches: the row's own, all of full attention; emptied, so that nearly nothing is in memory twice.

    Returns:
        The prefix, and caches of the tokens after it with as much room behind them as before.
    """
    keys, values, rest = [], [], []
    for cache in leaves(caches):
        after = KVCache()
        after.offset = cache.offset - n_tokens
        first_keys, after.keys = _apart(cache.keys, n_tokens)
        first_values, after.values = _apart(cache.values, n_tokens)
        cache.keys = cache.values = None
        keys.append(first_keys)
        values.append(first_values)
        rest.append(after)
    return SharedPrefix(StoredPrefix(keys, values, n_tokens), n_tokens), nested(caches, iter(rest))


def _apart(array: mx.array, n_tokens: int) -> tuple[mx.array, mx.array]:
    # Copied in any case: a slice may share the array's memory, and would keep all of it.
    parts = []
    for part in (array[:, :, :n_tokens], array[:, :, n_tokens:]):
        copy = mx.zeros(part.shape, part.dtype)
        copy[:] = part
        parts.append(copy)
    mx.eval(parts)
    return parts[0], parts[1]


def stored_bytes(prefixes: Iterable[SharedPrefix | None]) -> int:
    """Bytes of the stored prefixes, each counted once."""
    return sum(stored.nbytes for stored in {prefix.stored for prefix in prefixes if prefix is not None})
