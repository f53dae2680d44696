"""Moves cache bytes into MLX arrays and back; no other module does. Engine thread.

Arrays leave as NumPy views of a fresh, evaluated `mx.contiguous` result: a view of a live cache would change under
the reader. bfloat16, which NumPy does not have, travels as uint16.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from stoker_worker.engine.sequence import Sequence
from stoker_worker.models.cache_probe import leaves
from stoker_worker.ports import Array, CacheSlice, LayerKV, LayerState, RestoredPrefix, Snapshot
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec


class PrefixMover:
    """Moves a restored prefix into the model's own caches, a layer at a time.

    Attributes:
        caches: the model's caches, complete once `move` has returned ``True``.
    """

    def __init__(self, model: Any, prefix: RestoredPrefix, spec: ModelCacheSpec) -> None:
        self.caches: list[Any] = make_prompt_cache(model)
        self._layers = _fill(self.caches, prefix, spec)

    def move(self, budget_s: float) -> bool:
        """Move layers, at least one, for `budget_s` seconds; ``True`` when all have been moved."""
        until = time.perf_counter() + budget_s
        for arrays in self._layers:
            mx.eval(arrays)
            if time.perf_counter() > until:
                return False
        return True


def prefix_to_caches(model: Any, prefix: RestoredPrefix, spec: ModelCacheSpec) -> list[Any]:
    """The model's own caches with `prefix.n_tokens` tokens in them, evaluated."""
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


def cache_to_save(sequence: Sequence, caches: list[Any], spec: ModelCacheSpec) -> CacheSlice | None:
    """The cache of a finished sequence from `save_from` to its last kept token; ``None`` when none is to be saved."""
    start = sequence.work.save_from
    if start is None:
        return None
    snapshots = sequence.snapshots
    if spec.snapshot_layers and sequence.n_kept == len(sequence.generated):  # a window cannot be cut to a stop string
        snapshots = [*snapshots, take_snapshot(caches, sequence.n_tokens, spec)]
    return slice_caches(caches, start, sequence.n_prompt + sequence.n_kept, spec, tuple(snapshots))


def slice_caches(
    caches: list[Any], start: int, stop: int, spec: ModelCacheSpec, snapshots: tuple[Snapshot, ...] = ()
) -> CacheSlice:
    """Tokens [start, stop) of a finished sequence's extracted caches, evaluated, as NumPy views that own their bytes.

    Args:
        caches: as `Generator.take_out` returns them: K is (1, n_kv_heads, tokens, key_dim), V alike.
    """
    pairs = [
        (mx.contiguous(cache.keys[0, :, start:stop, :]), mx.contiguous(cache.values[0, :, start:stop, :]))
        for cache, layer in zip(leaves(caches), spec.layers, strict=True)
        if layer.kind == LayerKind.FULL
    ]
    mx.eval(pairs)
    layers: tuple[LayerKV, ...] = tuple((_to_numpy(keys), _to_numpy(values)) for keys, values in pairs)
    return CacheSlice(start=start, stop=stop, layers=layers, snapshots=snapshots)


def take_snapshot(caches: list[Any], n_tokens: int, spec: ModelCacheSpec) -> Snapshot:
    """The window and recurrent layers of extracted caches that hold `n_tokens` tokens. Other layers are not evaluated.

    Raises:
        ValueError: a cache does not have the shapes of `spec`.
    """
    arrays = [
        _state(cache, layer, n_tokens)
        for cache, layer in zip(leaves(caches), spec.layers, strict=True)
        if layer.kind in (LayerKind.WINDOW, LayerKind.RECURRENT)
    ]
    mx.eval(arrays)
    # Copied, because a slice that is contiguous already would keep the whole batch's array alive.
    states: tuple[LayerState, ...] = tuple(tuple(np.array(_to_numpy(x)) for x in layer) for layer in arrays)
    for state, layer in zip(states, spec.snapshot_layers, strict=True):
        if [x.shape for x in state] != [x.shape for x in layer.snapshot_arrays(n_tokens, spec.dtype)]:
            raise ValueError(f"a {layer.kind} cache after {n_tokens} tokens is {[x.shape for x in state]}")
    return Snapshot(n_tokens, states)


def _state(cache: Any, layer: LayerSpec, n_tokens: int) -> list[mx.array]:
    if layer.kind == LayerKind.RECURRENT:
        return [mx.contiguous(array[0]) for array in cache.cache]
    # The window of a sequence that decodes alone is a ring buffer; in mid-prefill it holds more than a window.
    in_order = [cache._temporal_order(array) for array in (cache.keys, cache.values)]
    n_kept = min(n_tokens, layer.window_tokens)
    return [mx.contiguous(array[0, :, max(0, array.shape[2] - n_kept) :, :]) for array in in_order]


def _to_mlx(array: Array, dtype: str) -> mx.array:
    moved = mx.array(array[None])
    return moved.view(mx.bfloat16) if dtype == "bfloat16" else moved


def _to_numpy(array: mx.array) -> Array:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
