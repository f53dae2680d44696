"""Full-attention caches that keep keys and values in 8 bits (``--kv-bits 8``), and the model that makes them.

Owns the arithmetic and the order of the planes; engine thread. Each element is ``code * scale + bias``, in groups of
neighbours along the head's dim, as in mlx-lm's `QuantizedKVCache`. A token is quantised once, when it is written, and
all attention reads the quantised values: so a restored cache gives the same answers as the original.
"""

from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models.cache_probe import leaves, nested
from stoker_worker.ports.cache_spec import ModelCacheSpec, group_size

_BITS: Final = 8
_LEAST_GROUP: Final = 32
"""MLX quantises in groups of 32, 64 or 128."""


class QuantisedCache(CacheList):  # type: ignore[misc]  # mlx-lm has no types
    """One layer's cache as a model sees it, over three caches of planes: codes (uint32, four in each), scales, biases.

    The planes are plain caches, so code that moves caches moves these: a sequence's own `KVCache`, or those of rows.
    """

    def __init__(self, *planes: Any) -> None:
        super().__init__(*(planes or (KVCache(), KVCache(), KVCache())))

    @property
    def offset(self) -> Any:
        return self.caches[0].offset

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.caches[0].make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Quantise and append keys and values, (sequences, n_kv_heads, tokens, dim) of a floating-point dtype. Returns
        all of them, dequantised, in the type that the planes' own `keys_and_values` returns."""
        for plane, *new in zip(self.caches, _quantised(keys), _quantised(values), strict=True):
            plane.update_and_fetch(*new)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        keys, values = zip(*(plane.keys_and_values() for plane in self.caches), strict=True)
        return _read(*keys), _read(*values)


def _quantised(array: mx.array) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(array, group_size=group_size(array.shape[-1]), bits=_BITS))


def _read(codes: Any, scales: Any, biases: Any) -> Any:
    if isinstance(codes, mx.array):
        return _dequantised(codes, scales, biases)
    return codes.combined(_dequantised, scales, biases)  # the rows of a pass, each with arrays of its own


def _dequantised(codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    # Not mlx-lm's products with quantised matrices: those hold all scores in memory, and are slower on a CPU.
    group = codes.shape[-1] * (codes.itemsize * 8 // _BITS) // scales.shape[-1]
    return mx.dequantize(codes, scales, biases, group_size=group, bits=_BITS)


def quantise_caches(model: Any, spec: ModelCacheSpec) -> None:
    """From now on `model` makes quantised caches for its full attention; other layers keep theirs. `spec` is that of
    its caches so far. Raises `ModelNotLoadable`, with the reason, if they cannot be quantised."""
    if not spec.full_layers:
        raise ModelNotLoadable("--kv-bits 8: this model has no full attention")
    dims = {dim for layer in spec.full_layers for dim in (layer.key_dim, layer.value_dim)}
    odd = sorted(dim for dim in dims if group_size(dim) < _LEAST_GROUP)
    if odd:
        raise ModelNotLoadable(
            f"--kv-bits 8: this model's heads have {odd[0]} elements, which groups of {_LEAST_GROUP} do not divide"
        )
    make_plain = getattr(model, "make_cache", lambda: [KVCache() for _ in model.layers])  # as mlx-lm has it

    def make_cache() -> list[Any]:
        caches = make_plain()
        return nested(caches, (QuantisedCache() if type(cache) is KVCache else cache for cache in leaves(caches)))

    model.make_cache = make_cache
