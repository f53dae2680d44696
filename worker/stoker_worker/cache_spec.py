"""What a model's cache is made of. Owns the description; does not touch arrays, and knows no model names."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

BLOCK_TOKENS: Final = 256
"""Tokens in a cache block: MLX's own KV growth step, so that a block boundary is never inside a reallocation."""

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of each cache dtype that is stored."""


class LayerKind(StrEnum):
    """How a layer's cache may be cut."""

    FULL = "full"
    """Full attention: K/V of every token, may be cut anywhere, so it is stored in blocks."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer's cache: K is (n_kv_heads, tokens, key_dim), V is (n_kv_heads, tokens, value_dim)."""

    kind: LayerKind
    n_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.n_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelCacheSpec:
    """Every layer's cache and the dtype they share.

    Attributes:
        layers: one spec per layer, in the model's order.
        dtype: ``float32``, ``float16`` or ``bfloat16``; bfloat16 travels as uint16 outside MLX.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str

    @classmethod
    def from_model(cls, model: Any) -> Self:
        """Read the spec off the caches that `model` makes and fills for one token.

        Raises:
            ModelNotLoadable: a layer's cache is of a kind that stoker does not serve.
        """
        from stoker_worker.engine.probe import probe_layers

        layers, dtype = probe_layers(model)
        return cls(layers=layers, dtype=dtype)

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.elements_per_token for layer in self.layers) * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * BLOCK_TOKENS

    def describe(self) -> str:
        """One canonical line: part of the model fingerprint and of every block file."""
        layers = ";".join(f"{x.kind}:{x.n_kv_heads}:{x.key_dim}:{x.value_dim}" for x in self.layers)
        return f"{self.dtype}|{layers}"
