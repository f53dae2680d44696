"""The first tokens of several rows, in memory once. Engine thread.

Owns their keys and values, which never change: each row's own arrays begin after them. They are in memory as long as a
row refers to them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_worker.models.cache_probe import leaves, nested


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """
    Attributes:
        keys, values: of every layer, (1, n_kv_heads, n_tokens, dim).
    """

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
        """A row's caches from its first token on, lazily.

        Args:
            caches: of its tokens after the prefix.
        """
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
        The prefix, and caches of the tokens after it with as much room after them as before.
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
    """Bytes of all that the prefixes refer to, each counted once."""
    return sum(stored.nbytes for stored in {prefix.stored for prefix in prefixes if prefix is not None})


def attention_after(
    queries: mx.array,
    prefix: tuple[mx.array, mx.array],
    own: tuple[mx.array, mx.array],
    scale: float,
    *,
    mask: mx.array | None,
    added: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one token of each row to a prefix of all rows and to tokens of its own.

    All rows' queries go through the prefix as one product, so it is read once. One softmax goes over all scores.

    Args:
        queries: (rows, n_heads, 1, dim).
        prefix: keys and values, (1, n_kv_heads, n_tokens, dim).
        own: keys and values, (rows, n_kv_heads, own tokens, dim).
        mask: which of its own tokens each row has, (rows, 1, 1, own tokens); ``None`` for all.
        added: to the scores, (rows, n_heads, 1, n_tokens + own tokens).
        sinks: a score of each head for no token, (n_heads,).
    """
    (first_keys, first_values), (keys, values) = prefix, own
    (n_rows, n_heads, _, dim), n_kv_heads, n_first = queries.shape, keys.shape[1], first_keys.shape[2]
    repeats = n_heads // n_kv_heads
    queries = (queries * scale).reshape(n_rows, n_kv_heads, repeats, dim)
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    scores = mx.concatenate([_of_all(queries, first_keys.swapaxes(-1, -2)), scores], axis=-1)
    if added is not None:
        scores = scores + added.reshape(scores.shape)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.reshape(1, n_kv_heads, repeats, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, sink.astype(scores.dtype)], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    n_all = n_first + keys.shape[2]
    out = _of_all(weights[..., :n_first], first_values) + weights[..., n_first:n_all] @ values
    return out.reshape(n_rows, n_heads, 1, values.shape[-1])


def _of_all(factors: mx.array, of_prefix: mx.array) -> mx.array:
    """The product of (rows, n_kv_heads, repeats, m) and (1, n_kv_heads, m, n): rows and repeats are one axis in it."""
    n_rows, n_kv_heads, repeats, m = factors.shape
    together = factors.swapaxes(0, 1).reshape(n_kv_heads, n_rows * repeats, m)
    return (together @ of_prefix[0]).reshape(n_kv_heads, n_rows, repeats, -1).swapaxes(0, 1)
