"""Cache bytes into MLX arrays and back: the only place where the two meet. Engine thread.

Arrays leave as NumPy views of a fresh, evaluated `mx.contiguous` result: a view of a live cache would change under
the reader. bfloat16, which NumPy does not have, travels as uint16.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from stoker_worker.cache_spec import ModelCacheSpec
from stoker_worker.ports import Array, CacheSlice, LayerKV, RestoredPrefix


def prefix_to_caches(prefix: RestoredPrefix, spec: ModelCacheSpec) -> list[KVCache]:
    """One `KVCache` per layer holding `prefix.n_tokens` tokens, ready for `BatchGenerator.insert(caches=...)`."""
    caches = []
    for keys, values in prefix.layers:
        cache = KVCache()
        cache.keys = _to_mlx(keys, spec.dtype)
        cache.values = _to_mlx(values, spec.dtype)
        cache.offset = prefix.n_tokens
        caches.append(cache)
    mx.eval([cache.state for cache in caches])
    return caches


def slice_caches(caches: Sequence[Any], start: int, stop: int) -> CacheSlice:
    """Tokens [start, stop) of a finished sequence's extracted caches, evaluated, as NumPy views that own their bytes.

    Args:
        caches: what `BatchGenerator` hands over with a finished sequence: K is (1, n_kv_heads, tokens, key_dim), V
            alike.
    """
    pairs = [
        (mx.contiguous(cache.keys[0, :, start:stop, :]), mx.contiguous(cache.values[0, :, start:stop, :]))
        for cache in caches
    ]
    mx.eval(pairs)
    layers: tuple[LayerKV, ...] = tuple((_to_numpy(keys), _to_numpy(values)) for keys, values in pairs)
    return CacheSlice(start=start, stop=stop, layers=layers)


def _to_mlx(array: Array, dtype: str) -> mx.array:
    moved = mx.array(array[None])
    return moved.view(mx.bfloat16) if dtype == "bfloat16" else moved


def _to_numpy(array: mx.array) -> Array:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
