"""What a batch costs in KV memory, in blocks. Pure; engine thread.

mlx-lm keeps a batch as one rectangle: every row is as long as the longest one, so rows of 4,096 and 7 x 64 tokens cost
eight times 4,096. Windows and recurrent states come on top, as far as they grow.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stoker_worker.cache_spec import BLOCK_TOKENS, ITEM_BYTES, LayerKind, ModelCacheSpec

_SLACK_TOKENS: Final = BLOCK_TOKENS - 1
"""MLX makes room for 256 tokens at a time, counted from wherever the batch stands."""


@dataclass(frozen=True)
class RowPrices:
    """Blocks that each decoding and each prefilling row of a batch has to hold."""

    decoding: int
    prefilling: int


@dataclass(frozen=True)
class BatchPricing:
    """Prices for one model.

    Attributes:
        prefill_tokens: most tokens of a row prefilled at once.
    """

    spec: ModelCacheSpec
    prefill_tokens: int

    @property
    def block_bytes(self) -> int:
        """What a block stands for: 256 tokens of all full-attention layers, or a whole row where there are none."""
        return BLOCK_TOKENS * self._token_bytes or max(1, self._beside(self.prefill_tokens))

    def of_batch(self, decoding: Collection[int], prefilling: Collection[int]) -> RowPrices:
        """Prices for rows of these lengths (tokens that each has, its whole prompt included)."""
        whole = self.row_blocks(max((*decoding, *prefilling), default=0))
        # Rows that are prefilled together are padded by as much as one of them goes ahead of another that ends.
        ahead = self.prefill_tokens if len(prefilling) > 1 else 0
        return RowPrices(whole, max(whole, self.row_blocks(max(prefilling, default=0) + ahead)))

    def row_blocks(self, n_tokens: int) -> int:
        """One row in a batch whose longest row is `n_tokens` long."""
        n_bytes = self._token_bytes * (n_tokens + _SLACK_TOKENS) + self._beside(n_tokens)
        return -(-n_bytes // self.block_bytes)

    def longest_row(self, n_blocks: int) -> int:
        """Most tokens of a row that has `n_blocks` blocks to itself; 0 when not even one fits."""
        low, high = 0, (n_blocks + 1) * BLOCK_TOKENS if self._token_bytes else 2**31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.row_blocks(middle) <= n_blocks else (low, middle - 1)
        return low

    @cached_property
    def _token_bytes(self) -> int:
        """Of every layer that may grow with the tokens, also of those that are not stored."""
        layers = [layer for layer in self.spec.layers if layer.kind in (LayerKind.FULL, LayerKind.UNKNOWN)]
        return sum(layer.elements_per_token for layer in layers) * ITEM_BYTES.get(self.spec.dtype, 4)

    def _beside(self, n_tokens: int) -> int:
        """Bytes of a row's windows and recurrent states at their largest: a window grows by what is prefilled."""
        n_bytes = 0
        for layer in self.spec.snapshot_layers:
            if layer.kind == LayerKind.WINDOW:
                rows = min(n_tokens + _SLACK_TOKENS, layer.window_tokens) + self.prefill_tokens
                n_bytes += rows * layer.elements_per_token * ITEM_BYTES[self.spec.dtype]
            else:
                n_bytes += sum(array.nbytes for array in layer.arrays)
        return n_bytes
