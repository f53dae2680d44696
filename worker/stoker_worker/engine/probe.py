"""Reads a model's cache layout off the caches it makes. Owns no state; engine thread."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.cache_spec import ITEM_BYTES, LayerKind, LayerSpec


def probe_layers(model: Any) -> tuple[tuple[LayerSpec, ...], str]:
    """Run one token through `model` and look at what its caches hold afterwards.

    Looking at filled caches instead of the config keeps model names and config dialects out of stoker: whatever the
    model's own code stores is what has to be stored.

    Returns:
        One spec per layer, and the name of the dtype that all of them share.

    Raises:
        ModelNotLoadable: a layer is not full attention, or the layers' dtypes differ or cannot be stored.
    """
    caches = make_prompt_cache(model)
    foreign = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if foreign:
        raise ModelNotLoadable(
            f"this model's layers use {', '.join(foreign)}; this version of stoker serves models whose layers are all "
            "full attention (KVCache)"
        )
    model(mx.array([[0]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    layers = tuple(_layer(cache) for cache in caches)
    dtypes = sorted({str(array.dtype).rpartition(".")[2] for cache in caches for array in (cache.keys, cache.values)})
    if len(dtypes) != 1 or dtypes[0] not in ITEM_BYTES:
        raise ModelNotLoadable(f"this model's cache is {' and '.join(dtypes)}; stoker stores {', '.join(ITEM_BYTES)}")
    return layers, dtypes[0]


def _layer(cache: KVCache) -> LayerSpec:
    _, n_kv_heads, _, key_dim = cache.keys.shape
    _, _, _, value_dim = cache.values.shape
    return LayerSpec(kind=LayerKind.FULL, n_kv_heads=n_kv_heads, key_dim=key_dim, value_dim=value_dim)
