"""The tensors of a cache file: names, order, shapes. Pure: no I/O, any thread.

Blocks and tails hold the K/V of the full-attention layers, snapshots the whole state of the others. Layers have the
model's own numbers, so each file of a hybrid model skips some.
"""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Final, Literal

import numpy as np

from stoker_worker.memory.quantised import BITS, packed_shapes
from stoker_worker.ports import LayerKV, LayerState, as_uint16_if_bfloat16
from stoker_worker.ports.cache_spec import ITEM_BYTES, LayerKind, LayerSpec, ModelCacheSpec

PieceKind = Literal["block", "tail", "snapshot"]
"""``block``: a full block, shared by all agents of one salt. ``tail``: an agent's last, partial block. ``snapshot``:
the window and recurrent layers of an agent after some tokens."""

_SAFETENSORS_NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `dtype` is a cache dtype, or ``uint8`` for quantised elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * (1 if self.dtype == "uint8" else ITEM_BYTES[self.dtype])

    @property
    def travel_dtype(self) -> "np.dtype[Any]":
        return as_uint16_if_bfloat16(self.dtype)


@dataclass(frozen=True)
class CacheLayout:
    """The data of one file.

    Attributes:
        cache: the model's `ModelCacheSpec.describe()`.
        tensors: one after the other, without gaps.
    """

    cache: str
    tensors: tuple[Tensor, ...]

    @cached_property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def table(self) -> str:
        """The tensors' part of the safetensors header, as JSON without the outer braces."""
        at, entries = 0, []
        for tensor in self.tensors:
            end = at + tensor.n_bytes
            about = {
                "dtype": _SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            entries.append(f'"{tensor.name}":{json.dumps(about, separators=(",", ":"))}')
            at = end
        return ",".join(entries)


@lru_cache(maxsize=300)
def layout_of(spec: ModelCacheSpec, kind: PieceKind, n_tokens: int) -> CacheLayout:
    """The layout of a block or tail of `n_tokens` tokens, or of a snapshot after that many. Cached."""
    parts: list[Tensor] = []
    for index, layer in enumerate(spec.layers):
        if (layer.kind == LayerKind.FULL) == (kind == "snapshot"):
            continue
        name = f"layer.{index}"
        if kind == "snapshot":
            parts += _state_tensors(name, layer, n_tokens, spec.dtype)
        else:
            for side, dim in (("keys", layer.key_dim), ("values", layer.value_dim)):
                shape = (layer.n_kv_heads, n_tokens, dim)
                if is_quantised(spec, kind):
                    parts += _quantised_tensors(f"{name}.{side}", shape, BITS[spec.store_dtype])
                else:
                    parts.append(Tensor(f"{name}.{side}", spec.dtype, shape))
    return CacheLayout(spec.describe(), tuple(parts))


def is_quantised(spec: ModelCacheSpec, kind: PieceKind) -> bool:
    """Blocks may be; tails and snapshots are small, and replaced every turn."""
    return kind == "block" and spec.store_dtype != "native"


def empty_layers(spec: ModelCacheSpec, n_tokens: int) -> tuple[LayerKV, ...]:
    """Uninitialised arrays for the full-attention layers' cache of `n_tokens` tokens."""
    # One array per side and layer, from malloc: the C library reuses the last restore's memory, while the system would
    # have to zero new pages first.
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return tuple((np.empty(keys, dtype), np.empty(values, dtype)) for keys, values in _kv_shapes(spec, n_tokens))


def empty_states(spec: ModelCacheSpec, n_tokens: int) -> tuple[LayerState, ...]:
    """Uninitialised arrays for a snapshot after `n_tokens` tokens."""
    return tuple(tuple(np.empty(*about) for about in layer) for layer in _state_arrays(spec, n_tokens))


def fits(spec: ModelCacheSpec, layers: tuple[LayerKV, ...], n_tokens: int) -> bool:
    """Whether arrays of another maker have the shapes and dtype of the full-attention layers' cache."""
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return [(keys.shape, values.shape) for keys, values in layers] == _kv_shapes(spec, n_tokens) and all(
        array.dtype == dtype for pair in layers for array in pair
    )


def state_fits(spec: ModelCacheSpec, states: tuple[LayerState, ...], n_tokens: int) -> bool:
    """Whether arrays of another maker have the shapes and dtypes of a snapshot after `n_tokens` tokens."""
    return [[(array.shape, array.dtype) for array in arrays] for arrays in states] == _state_arrays(spec, n_tokens)


def _kv_shapes(spec: ModelCacheSpec, n_tokens: int) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Of keys and values of each full-attention layer."""
    return [((x.n_kv_heads, n_tokens, x.key_dim), (x.n_kv_heads, n_tokens, x.value_dim)) for x in spec.full_layers]


def _state_arrays(spec: ModelCacheSpec, n_tokens: int) -> list[list[tuple[tuple[int, ...], "np.dtype[Any]"]]]:
    """The arrays of each window and recurrent layer."""
    layers = (layer.snapshot_arrays(n_tokens, spec.dtype) for layer in spec.snapshot_layers)
    return [[(array.shape, as_uint16_if_bfloat16(array.dtype)) for array in layer] for layer in layers]


def _state_tensors(name: str, layer: LayerSpec, n_tokens: int, dtype: str) -> list[Tensor]:
    arrays = layer.snapshot_arrays(n_tokens, dtype)
    names = ("keys", "values") if layer.kind == LayerKind.WINDOW else [f"state.{i}" for i in range(len(arrays))]
    return [Tensor(f"{name}.{part}", array.dtype, array.shape) for part, array in zip(names, arrays, strict=True)]


def _quantised_tensors(name: str, shape: tuple[int, int, int], bits: int) -> list[Tensor]:
    packed, groups = packed_shapes(shape, bits)
    return [
        Tensor(f"{name}.q", "uint8", packed),
        Tensor(f"{name}.scales", "float32", groups),
        Tensor(f"{name}.biases", "float32", groups),
    ]
