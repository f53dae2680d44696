"""Reads a model's `ModelCacheSpec` off the caches that it makes. Owns no state; engine thread."""

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.ports.cache_spec import ITEM_BYTES, ArraySpec, LayerKind, LayerSpec, ModelCacheSpec, StoreDtype

_UNKNOWN = LayerSpec(LayerKind.UNKNOWN)
_PACKED = "uint32"
"""The dtype of 8-bit codes (`models/quantised_cache.py`)."""


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """Every single cache, also in mlx-lm's `CacheList`: caches of one layer, or the planes of a quantised one."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def nested(like: Iterable[Any], flat: Iterator[Any]) -> list[Any]:
    """The opposite of `leaves`: the caches of `flat`, in lists as in `like`."""
    return [type(x)(*nested(x.caches, flat)) if isinstance(x, CacheList) else next(flat) for x in like]


def read_cache_spec(model: Any, store_dtype: StoreDtype = "native") -> ModelCacheSpec:
    """Run one token through `model` and read the layout of its filled caches.

    Reading caches instead of the config keeps model names and config dialects out of stoker: the arrays that the
    model's own code keeps are the arrays to store.

    Returns:
        One layer per cache; UNKNOWN if its type is unknown, or if it has arrays of a dtype that is not stored.

    Raises:
        ModelNotLoadable: the model does not run.
    """
    caches = make_prompt_cache(model)
    try:
        mx.eval(model(mx.array([[0]]), cache=caches))
    except Exception as error:
        raise ModelNotLoadable(f"this model does not run: {type(error).__name__}: {error}") from error
    found = list(leaves(caches))
    dtypes = {_name(cache.keys.dtype) for cache in found if type(cache) in (KVCache, RotatingKVCache)}
    dtypes = dtypes or {_name(array.dtype) for cache in found if type(cache) is ArraysCache for array in cache.cache}
    dtype = min(dtypes, default="float32")
    return ModelCacheSpec(tuple(_layer(cache, dtype) for cache in found), dtype, store_dtype)


def _layer(cache: Any, dtype: str) -> LayerSpec:
    if type(cache) is ArraysCache:
        arrays = cache.cache
        if any(array is None or _name(array.dtype) not in ITEM_BYTES for array in arrays):
            return _UNKNOWN
        return LayerSpec(
            LayerKind.RECURRENT, arrays=tuple(ArraySpec(tuple(x.shape[1:]), _name(x.dtype)) for x in arrays)
        )
    is_window = type(cache) is RotatingKVCache and cache.keep == 0
    if not is_window and type(cache) is not KVCache:
        return _unknown(cache)
    dtypes = {_name(cache.keys.dtype), _name(cache.values.dtype)}
    is_packed = dtypes == {_PACKED}
    if (dtypes != {dtype} and not is_packed) or dtype not in ITEM_BYTES:
        return _UNKNOWN
    _, n_kv_heads, _, key_dim = cache.keys.shape
    per_element = cache.keys.itemsize // ITEM_BYTES[dtype] if is_packed else 1
    return LayerSpec(
        LayerKind.WINDOW if is_window else LayerKind.FULL,
        n_kv_heads=n_kv_heads,
        key_dim=per_element * key_dim,
        value_dim=per_element * cache.values.shape[3],
        window_tokens=cache.max_size if is_window else 0,
        is_packed=is_packed,
    )


def _unknown(cache: Any) -> LayerSpec:
    """A layer that is not stored. If its cache looks like K/V, its memory is counted as such."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array) and keys.ndim == values.ndim == 4):
        return _UNKNOWN
    return LayerSpec(LayerKind.UNKNOWN, n_kv_heads=keys.shape[1], key_dim=keys.shape[3], value_dim=values.shape[3])


def can_be_batched(model: Any) -> bool:
    """True if mlx-lm can put several sequences of this model into one batch."""
    return all(hasattr(cache, "merge") for cache in leaves(make_prompt_cache(model)))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
