"""Cache bytes on their way into a model's own caches, and out of them. Engine thread; loaders make and fill a
`MlxRoom`.

The keys and values of full attention change hands without a copy: a restored prefix brings the memory in which the
model continues, and a sequence that has ended gives its memory away. bfloat16, which NumPy does not have, travels as
uint16, and 8-bit codes travel as elements of the spec's dtype.
"""

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from stoker_worker.engine.kv_memory import GROW_STEPS, room_for
from stoker_worker.engine.sequence import Sequence
from stoker_worker.models.cache_probe import leaves
from stoker_worker.ports import (
    Array,
    LayerKV,
    LayerState,
    PrefixRoom,
    SequenceCache,
    Snapshot,
    as_uint16_if_bfloat16,
)
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

_PAUSE_S: Final = 1e-5
_PAUSE_BYTES: Final = 4 << 20
"""MLX holds the interpreter's lock while it makes an array. After so many bytes, a waiting thread gets the lock; a
pause for each small array would take longer than making it."""


class MlxRoom(PrefixRoom):
    """MLX arrays of (1, n_kv_heads, room, dim) per full-attention layer, of its dtype; bfloat16 is uint16 until `take`.
    Implements `PrefixRoom`."""

    def __init__(
        self, spec: ModelCacheSpec, n_tokens: int, n_left: int, arrays: list[tuple[mx.array, mx.array]] | None = None
    ) -> None:
        """Room for a prompt of `n_tokens` and some of the `n_left` tokens of its answer. `arrays` are the pairs of a
        sequence that has ended; ``None`` makes new ones."""
        self._views: list[weakref.ref[Array]] = []
        self._arrays = list(arrays or _empty_pairs(spec, room_for(n_tokens, n_left, is_shared=False)))
        self._dtypes = [mlx_dtype(layer, spec) for layer in spec.full_layers]

    def has_room_for(self, n_tokens: int) -> bool:
        return all(keys.shape[2] >= n_tokens + GROW_STEPS for keys, _ in self._arrays)

    @property
    def is_viewed(self) -> bool:
        return any(view() is not None for view in self._views)

    def layers(self) -> tuple[LayerKV, ...]:
        return tuple((self._view(keys), self._view(values)) for keys, values in self._arrays)

    def take(self) -> list[tuple[Any, Any]]:
        if self.is_viewed or len(self._arrays) < len(self._dtypes):
            raise ValueError("the memory of a restored cache is still in use, or was taken before")
        arrays, self._arrays = self._arrays, []
        return [(keys.view(as_), values.view(as_)) for (keys, values), as_ in zip(arrays, self._dtypes, strict=True)]

    def _view(self, array: mx.array) -> Array:
        view = np.asarray(array)
        self._views.append(weakref.ref(view))
        row: Array = view[0]
        return row


def _empty_pairs(spec: ModelCacheSpec, room: int) -> Iterator[tuple[mx.array, mx.array]]:
    n_bytes = 0

    def empty(layer: LayerSpec, dim: int) -> mx.array:
        nonlocal n_bytes
        # Takes no memory yet: the system maps all of it to one page of zeros.
        source = np.empty((1, layer.n_kv_heads, room, dim), as_uint16_if_bfloat16(spec.dtype))
        n_bytes += source.nbytes
        if n_bytes >= _PAUSE_BYTES:
            time.sleep(_PAUSE_S)
            n_bytes = 0
        return mx.array(source)

    for layer in spec.full_layers:
        yield empty(layer, layer.key_dim), empty(layer, layer.value_dim)


def mlx_dtype(layer: LayerSpec, spec: ModelCacheSpec) -> mx.Dtype:
    """The MLX dtype of a full-attention layer's K and V. Elsewhere the same bytes have the spec's dtype."""
    dtype: mx.Dtype = mx.uint32 if layer.is_packed else getattr(mx, spec.dtype)
    return dtype


def prefix_to_caches(model: Any, prefix: SequenceCache, spec: ModelCacheSpec) -> list[Any]:
    """The model's own caches with `prefix.n_tokens` tokens in them, and room for more. Raises `ValueError` if the
    prefix is not one of this model, or its memory is still in use."""
    caches: list[Any] = make_prompt_cache(model)
    room = prefix.room
    if room is None or prefix.layers:
        prefix.copied_into(room := MlxRoom(spec, prefix.n_tokens, 0))
    layers = iter(room.take())
    states = (state for snapshot in prefix.snapshots[-1:] for state in snapshot.states)
    for cache, layer in zip(leaves(caches), spec.layers, strict=True):
        if layer.kind == LayerKind.FULL:
            cache.keys, cache.values = next(layers)
            cache.offset = prefix.n_tokens
            continue
        moved = _state_to_mlx(next(states, ()), layer, prefix.n_tokens, spec)
        if layer.kind == LayerKind.RECURRENT:
            cache.cache = moved
        else:
            cache.keys, cache.values = moved
            cache.offset, cache._idx = prefix.n_tokens, cache.keys.shape[2]
    return caches


def caches_at(model: Any, spec: ModelCacheSpec, caches: list[Any], at: Snapshot) -> list[Any]:
    """New caches as they were at a snapshot of a sequence whose caches are `caches` by now."""
    prefix = replace(slice_caches(caches, at.n_tokens, spec), snapshots=(at,))
    return prefix_to_caches(model, prefix, spec)


def _state_to_mlx(state: LayerState, layer: LayerSpec, n_tokens: int, spec: ModelCacheSpec) -> list[mx.array]:
    wanted = layer.snapshot_arrays(n_tokens, spec.dtype)
    if [array.shape for array in state] != [array.shape for array in wanted]:
        raise ValueError(f"a restored {layer.kind} cache after {n_tokens} tokens is {[x.shape for x in state]}")
    moved = [mx.array(array[None]) for array in state]
    return [x.view(mx.bfloat16) if of.dtype == "bfloat16" else x for x, of in zip(moved, wanted, strict=True)]


def cache_to_save(sequence: Sequence, caches: list[Any], spec: ModelCacheSpec) -> SequenceCache | None:
    """The cache of a finished sequence up to its last kept token; ``None`` if it is not to be saved."""
    n_tokens = sequence.n_to_save
    if not sequence.work.is_saved or not n_tokens:
        return None
    snapshots = sequence.snapshots
    if spec.snapshot_layers and sequence.n_kept == len(sequence.generated):  # a window cannot be cut to a stop string
        snapshots = [*snapshots, take_snapshot(caches, n_tokens, spec)]
    checkpoints = sequence.checkpoints
    if not spec.snapshot_layers:  # keys and values may be cut anywhere
        checkpoints = tuple(Snapshot(n, ()) for n in sequence.work.checkpoints_at if n < sequence.n_prompt)
    return replace(slice_caches(caches, n_tokens, spec), snapshots=tuple(snapshots), checkpoints=checkpoints)


def slice_caches(caches: list[Any], n_tokens: int, spec: ModelCacheSpec) -> SequenceCache:
    """The first `n_tokens` tokens of the cache of a sequence that has ended, as views of its own arrays, not copies.

    Args:
        caches: as from `Generator.take_out`: K is (1, n_kv_heads, at least `n_tokens`, key_dim), V alike. Nobody else
            may use them any more, because NumPy would see their memory change or go.
    """
    dtype = mx.uint16 if spec.dtype == "bfloat16" else getattr(mx, spec.dtype)
    pairs = [
        (cache.keys.view(dtype), cache.values.view(dtype))
        for cache, layer in zip(leaves(caches), spec.layers, strict=True)
        if layer.kind == LayerKind.FULL
    ]
    mx.eval(pairs)
    room = MlxRoom(spec, n_tokens, 0, pairs)
    layers = tuple((keys[:, :n_tokens], values[:, :n_tokens]) for keys, values in room.layers())
    return SequenceCache(n_tokens, layers, room=room)


def take_snapshot(caches: list[Any], n_tokens: int, spec: ModelCacheSpec) -> Snapshot:
    """The window and recurrent layers of extracted caches that hold `n_tokens` tokens. Other layers are not evaluated.
    Raises `ValueError` if a cache does not have the shapes of `spec`."""
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


def _to_numpy(array: mx.array) -> Array:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
