"""Cache bytes into MLX arrays and back: the only place where the two meet. Engine thread.

Arrays leave as NumPy views of a fresh, evaluated `mx.contiguous` result: a view of a live cache would change under
the reader. bfloat16, which NumPy does not have, travels as uint16.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from stoker_worker.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.engine.probe import leaves
from stoker_worker.ports import Array, CacheSlice, LayerKV, LayerState, RestoredPrefix, Snapshot


class PrefixMover:
    """Moves a restored prefix into the model's own caches, a layer at a time.

    Attributes:
        caches: the caches; complete once `move` has said so. Ready for `BatchGenerator.insert(caches=...)`.
    """

    def __init__(self, model: Any, prefix: RestoredPrefix, spec: ModelCacheSpec) -> None:
        self.caches: list[Any] = make_prompt_cache(model)
        self._layers = _fill(self.caches, prefix, spec)

    def move(self, budget_s: float) -> bool:
        """Move layers, at least one, until `budget_s` seconds are over; ``True`` when all are there."""
        until = time.perf_counter() + budget_s
        for arrays in self._layers:
            mx.eval(arrays)
            if time.perf_counter() > until:
                return False
        return True


def prefix_to_caches(model: Any, prefix: RestoredPrefix, spec: ModelCacheSpec) -> list[Any]:
    """The model's own caches holding `prefix.n_tokens` tokens, evaluated."""
    mover = PrefixMover(model, prefix, spec)
    mover.move(math.inf)
    return mover.caches


def _fill(caches: list[Any], prefix: RestoredPrefix, spec: ModelCacheSpec) -> Iterator[list[mx.array]]:
    layers, states = iter(prefix.layers), iter(prefix.states)
    for cache, layer in zip(leaves(caches), spec.layers, strict=True):
        if layer.kind == LayerKind.RECURRENT:
            cache.cache = [_to_mlx(x, of.dtype) for x, of in zip(next(states), layer.arrays, strict=True)]
            yield cache.cache
            continue
        keys, values = next(layers if layer.kind == LayerKind.FULL else states)
        cache.keys, cache.values = _to_mlx(keys, spec.dtype), _to_mlx(values, spec.dtype)
        cache.offset = prefix.n_tokens
        if layer.kind == LayerKind.WINDOW:
            cache._idx = keys.shape[1]
        yield [cache.keys, cache.values]


def slice_caches(
    caches: Sequence[Any], start: int, stop: int, spec: ModelCacheSpec, snapshots: tuple[Snapshot, ...] = ()
) -> CacheSlice:
    """Tokens [start, stop) of a finished sequence's extracted caches, evaluated, as NumPy views that own their bytes.

    Args:
        caches: what `BatchGenerator` hands over with a finished sequence: K is (1, n_kv_heads, tokens, key_dim), V
            alike.
    """
    pairs = [
        (mx.contiguous(cache.keys[0, :, start:stop, :]), mx.contiguous(cache.values[0, :, start:stop, :]))
        for cache, layer in zip(leaves(caches), spec.layers, strict=True)
        if layer.kind == LayerKind.FULL
    ]
    mx.eval(pairs)
    layers: tuple[LayerKV, ...] = tuple((_to_numpy(keys), _to_numpy(values)) for keys, values in pairs)
    return CacheSlice(start=start, stop=stop, layers=layers, snapshots=snapshots)


def take_snapshot(caches: Sequence[Any], n_tokens: int, spec: ModelCacheSpec) -> Snapshot:
    """The window and recurrent layers of extracted caches that hold `n_tokens` tokens. Other layers are not evaluated.

    Raises:
        ValueError: a cache is not of the shapes that `spec` says.
    """
    arrays = [
        _state(cache, layer, n_tokens)
        for cache, layer in zip(leaves(caches), spec.layers, strict=True)
        if layer.kind in (LayerKind.WINDOW, LayerKind.RECURRENT)
    ]
    mx.eval(arrays)
    # Copied, because a slice that is contiguous as it is would keep the whole batch's array alive.
    states: tuple[LayerState, ...] = tuple(tuple(np.array(_to_numpy(x)) for x in layer) for layer in arrays)
    for state, layer in zip(states, spec.snapshot_layers, strict=True):
        if [x.shape for x in state] != [x.shape for x in layer.snapshot_arrays(n_tokens, spec.dtype)]:
            raise ValueError(f"a {layer.kind} cache after {n_tokens} tokens is {[x.shape for x in state]}")
    return Snapshot(n_tokens, states)


def _state(cache: Any, layer: LayerSpec, n_tokens: int) -> list[mx.array]:
    if layer.kind == LayerKind.RECURRENT:
        return [mx.contiguous(array[0]) for array in cache.cache]
    # The window of a row that decodes alone goes round in its buffer; in mid-prefill it holds more than a window.
    in_order = [cache._temporal_order(array) for array in (cache.keys, cache.values)]
    n_kept = min(n_tokens, layer.window_tokens)
    return [mx.contiguous(array[0, :, max(0, array.shape[2] - n_kept) :, :]) for array in in_order]


def _to_mlx(array: Array, dtype: str) -> mx.array:
    moved = mx.array(array[None])
    return moved.view(mx.bfloat16) if dtype == "bfloat16" else moved


def _to_numpy(array: mx.array) -> Array:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
