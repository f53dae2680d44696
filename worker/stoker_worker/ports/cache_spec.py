"""The layout of a model's cache, as data: `models/cache_probe.py` reads it off a model. No arrays, no model names."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import gcd, prod
from typing import Final, Literal, Self, get_args

BLOCK_TOKENS: Final = 256
"""Tokens in a cache block: MLX's own KV growth step, so that a block boundary is never inside a reallocation."""

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of each cache dtype that is stored."""

StoreDtype = Literal["native", "q8", "q4"]
"""Precision of full-attention blocks at rest: the model's own, or affine with 8 or 4 bits per element."""

GROUP_SIZE: Final = 64
"""Most elements, neighbours along the head's dim, that share one scale and one bias in a quantised block."""


class LayerKind(StrEnum):
    """How a layer's cache may be cut."""

    FULL = "full"
    """Full attention: K/V of every token. It may be cut anywhere, so it is stored in blocks."""

    WINDOW = "window"
    """Sliding window: K/V of the last tokens. It is usable exactly where it was taken, so it is stored in snapshots."""

    RECURRENT = "recurrent"
    """A state of fixed size that every token changes (SSM, linear attention, convolution): stored in snapshots too."""

    UNKNOWN = "unknown"
    """Anything else. A model with such a layer is served, but without memory."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape (without the batch dimension) and dtype of one array of a snapshot."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def describe(self) -> str:
        return f"{'x'.join(map(str, self.shape))}/{self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Self:
        shape, dtype = text.split("/")
        return cls(tuple(_number(part) for part in shape.split("x")) if shape else (), _dtype(dtype))


@dataclass(frozen=True)
class LayerSpec:
    """One layer's cache. A layer with two caches counts as two, and one in 8 bits (``--kv-bits 8``) as three: codes,
    scales, biases.

    Attributes:
        n_kv_heads, key_dim, value_dim: of FULL and WINDOW: K is (n_kv_heads, tokens, key_dim), V has `value_dim`.
        window_tokens: most tokens that a WINDOW layer keeps.
        arrays: the arrays that a RECURRENT layer keeps.
        is_packed: of FULL: K and V are 8-bit codes, four in a uint32; outside MLX, bytes that pass as the spec's dtype.
    """

    kind: LayerKind
    n_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int = 0
    arrays: tuple[ArraySpec, ...] = ()
    is_packed: bool = False

    @property
    def elements_per_token(self) -> int:
        return self.n_kv_heads * (self.key_dim + self.value_dim)

    def snapshot_arrays(self, n_tokens: int, dtype: str) -> tuple[ArraySpec, ...]:
        """The layer's arrays in a snapshot after `n_tokens` tokens; none for a FULL layer."""
        if self.kind == LayerKind.WINDOW:
            kept = min(n_tokens, self.window_tokens)
            return tuple(ArraySpec((self.n_kv_heads, kept, dim), dtype) for dim in (self.key_dim, self.value_dim))
        return self.arrays

    def describe(self) -> str:
        if self.kind == LayerKind.RECURRENT:
            return f"{self.kind}:" + ",".join(array.describe() for array in self.arrays)
        text = f"{self.kind}:{self.n_kv_heads}:{self.key_dim}:{self.value_dim}" + (":packed" if self.is_packed else "")
        return f"{text}:{self.window_tokens}" if self.kind == LayerKind.WINDOW else text

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, rest = text.partition(":")
        kind = LayerKind(name)
        if kind == LayerKind.RECURRENT:
            return cls(kind, arrays=tuple(map(ArraySpec.parse, rest.split(",") if rest else ())))
        is_packed = kind == LayerKind.FULL and rest.endswith(":packed")
        numbers = [_number(part) for part in (rest.removesuffix(":packed") if is_packed else rest).split(":")]
        names = ("n_kv_heads", "key_dim", "value_dim", "window_tokens")[: 4 if kind == LayerKind.WINDOW else 3]
        if len(numbers) != len(names):
            raise ValueError(f"no layer of a cache: {text!r}")
        return cls(kind, **dict(zip(names, numbers, strict=True)), is_packed=is_packed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModelCacheSpec:
    """Every layer's cache, in the model's order.

    Attributes:
        dtype: of K and V: ``float32``, ``float16`` or ``bfloat16``; bfloat16 travels as uint16 outside MLX.
        store_dtype: precision of blocks at rest, a part of the identity because the loaded values depend on it.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str
    store_dtype: StoreDtype = "native"

    @cached_property
    def full_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind == LayerKind.FULL)

    @cached_property
    def snapshot_layers(self) -> tuple[LayerSpec, ...]:
        """The layers stored in snapshots: they decide at which tokens a cache can be restored."""
        return tuple(layer for layer in self.layers if layer.kind in (LayerKind.WINDOW, LayerKind.RECURRENT))

    @property
    def has_only_full_layers(self) -> bool:
        return all(layer.kind == LayerKind.FULL for layer in self.layers)

    @property
    def can_be_stored(self) -> bool:
        return all(layer.kind != LayerKind.UNKNOWN for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the full-attention layers, in the model's own precision."""
        return sum(layer.elements_per_token for layer in self.full_layers) * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * BLOCK_TOKENS

    def snapshot_bytes(self, n_tokens: int) -> int:
        layers = self.snapshot_layers
        return sum(array.nbytes for layer in layers for array in layer.snapshot_arrays(n_tokens, self.dtype))

    def describe(self) -> str:
        """One canonical line: part of the model fingerprint and of every cache file."""
        layers = ";".join(layer.describe() for layer in self.layers)
        return f"{self.dtype}|{layers}" + (f"|{self.store_dtype}" if self.store_dtype != "native" else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The spec that `describe` wrote. Raises `ValueError` for any other text."""
        dtype, layers, *others = text.split("|")
        store_dtype = next((one for one in get_args(StoreDtype) if [one] == (others or ["native"])), None)
        if store_dtype is None:
            raise ValueError(f"no precision of a cache at rest: {others}")
        parsed = tuple(map(LayerSpec.parse, layers.split(";") if layers else ()))
        spec = cls(parsed, _dtype(dtype), store_dtype)
        if spec.describe() != text:
            raise ValueError(f"no layout of a cache: {text!r}")
        return spec


def group_size(dim: int) -> int:
    """Elements per scale in a quantised block: 64, or the largest power of two below it that divides `dim`."""
    return gcd(dim, GROUP_SIZE)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"no number: {text!r}")
    return int(text)


def _dtype(text: str) -> str:
    if text not in ITEM_BYTES:
        raise ValueError(f"no dtype of a cache: {text!r}")
    return text
