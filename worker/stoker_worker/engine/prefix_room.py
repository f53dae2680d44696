"""Memory for the caches of one sequence, which restored tokens are read into and the model goes on in. Loader thread,
then engine thread.

Nothing here runs an MLX operation off the engine thread: that would make streams, which belong to a thread.
"""

import time
import weakref
from typing import Any, Final

import mlx.core as mx
import numpy as np

from stoker_worker.engine.rows.room import room_for
from stoker_worker.ports import Array, LayerKV, PrefixRoom, as_uint16_if_bfloat16
from stoker_worker.ports.cache_spec import LayerSpec, ModelCacheSpec

_PAUSE_S: Final = 1e-5
_PAUSE_BYTES: Final = 4 << 20
"""MLX holds the interpreter's lock while it makes an array. After so many bytes, a thread that waits for the lock gets
it; a pause for each small array would take longer than to make it."""


class MlxRoom(PrefixRoom):
    """MLX arrays of (1, n_kv_heads, room, dim) per full-attention layer. Implements `PrefixRoom`."""

    def __init__(self, spec: ModelCacheSpec, n_tokens: int, n_left: int) -> None:
        """Room for a prompt of `n_tokens` and some of the `n_left` tokens of its answer."""
        self._views: list[weakref.ref[Array]] = []
        room, dtype = room_for(n_tokens, n_left, is_shared=False), as_uint16_if_bfloat16(spec.dtype)
        n_bytes = 0

        def empty(layer: LayerSpec, dim: int) -> mx.array:
            nonlocal n_bytes
            # It has no memory of its own: the system shows one page of zeros in all its places.
            source = np.empty((1, layer.n_kv_heads, room, dim), dtype)
            n_bytes += source.nbytes
            if n_bytes >= _PAUSE_BYTES:
                time.sleep(_PAUSE_S)
                n_bytes = 0
            return mx.array(source)

        self._arrays = [
            (empty(layer, layer.key_dim), empty(layer, layer.value_dim), mlx_dtype(layer, spec))
            for layer in spec.full_layers
        ]

    def layers(self) -> tuple[LayerKV, ...]:
        return tuple((self._view(keys), self._view(values)) for keys, values, _ in self._arrays)

    def take(self) -> list[tuple[Any, Any]]:
        if any(view() is not None for view in self._views):
            raise ValueError("the memory of a restored cache is still in use")
        arrays, self._arrays = self._arrays, []
        return [(keys.view(dtype), values.view(dtype)) for keys, values, dtype in arrays]

    def _view(self, array: mx.array) -> Array:
        view = np.asarray(array)
        self._views.append(weakref.ref(view))
        row: Array = view[0]
        return row


def mlx_dtype(layer: LayerSpec, spec: ModelCacheSpec) -> mx.Dtype:
    """What a full-attention layer's K and V are in MLX; elsewhere the same bytes are of the spec's dtype."""
    dtype: mx.Dtype = mx.uint32 if layer.is_packed else getattr(mx, spec.dtype)
    return dtype
