"""KV memory as numbers: the room that rows take, the blocks that a batch costs, and a pool of blocks. Pure: no arrays;
engine thread. The scheduler owns admission and preemption.

In rows, a sequence costs its own length. mlx-lm keeps a batch as one rectangle, in which every sequence is as long as
the longest: sequences of 4,096 and 7 x 64 tokens cost eight times 4,096. Windows and recurrent states come on top.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ITEM_BYTES, LayerKind, ModelCacheSpec

MOST_SHARED_TOKENS: Final = 256
"""A longer row joins no group: copying it when it comes and when it leaves costs more than wider updates save. A group
that grows to twice this length is dissolved."""

MOST_APART: Final = 64
"""Most tokens by which the rows of a group differ in length when they join: the shorter ones waste as many."""

_STEP_TOKENS: Final = 64
_LONG_TOKENS: Final = 2 * MOST_SHARED_TOKENS
_LONG_STEP_TOKENS: Final = 256
"""A long row grows by more tokens at a time, because growing copies it."""

GROW_STEPS: Final = 32
"""A row alone in its group grows over so many steps, some of its layers in each."""

SPARE_SHARE: Final = 8
"""A group keeps at most one spare place for so many rows: a row that joins after another has left is then copied
without the group."""


def room_for(n_tokens: int, n_left: int, *, is_shared: bool) -> int:
    """Tokens of room for a row of `n_tokens` that may generate `n_left` more, and may have to grow for them."""
    step = _STEP_TOKENS if is_shared or n_tokens <= _LONG_TOKENS else _LONG_STEP_TOKENS
    return -(-(n_tokens + min(n_left, step)) // step) * step


def most_room(n_tokens: int) -> int:
    """Most tokens of room for a row of `n_tokens`, with its share of spare places."""
    if n_tokens > _LONG_TOKENS:
        return n_tokens + 2 * _LONG_STEP_TOKENS
    place = n_tokens + MOST_APART + 2 * _STEP_TOKENS
    return place + -(-place // SPARE_SHARE)


_SLACK_TOKENS: Final = BLOCK_TOKENS - 1
"""mlx-lm's batch allocates 256 tokens at a time, counted from its current length."""


@dataclass(frozen=True)
class KVCost:
    """The cost of sequences of one model.

    Attributes:
        prefill_tokens: most tokens of a sequence prefilled at once.
        in_rows: whether each sequence's full attention has a cache of its own.
    """

    spec: ModelCacheSpec
    prefill_tokens: int
    in_rows: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens in all layers that grow with the tokens; without such layers, of a whole sequence."""
        return BLOCK_TOKENS * self._token_bytes or max(1, self._beside(self.prefill_tokens))

    def of_batch(self, decoding: Sequence[int], prefilling: Sequence[int]) -> list[int]:
        """Blocks that each sequence has to hold: first the decoding ones, then those in prefill.

        Args:
            decoding, prefilling: their lengths in tokens; one in prefill counts with its whole prompt.
        """
        longest = max((*decoding, *prefilling), default=0)
        if self.in_rows:
            return [self._blocks(n, beside=longest) for n in (*decoding, *prefilling)]
        whole = self.sequence_blocks(longest)
        # Of prompts that are prefilled together, those with a shorter chunk are padded to the longest one.
        ahead = self.prefill_tokens if len(prefilling) > 1 else 0
        padded = max(whole, self.sequence_blocks(max(prefilling, default=0) + ahead))
        return [*(whole for _ in decoding), *(padded for _ in prefilling)]

    def sequence_blocks(self, n_tokens: int) -> int:
        """Blocks of one sequence alone, or in a batch of mlx-lm's whose longest sequence has `n_tokens` tokens."""
        return self._blocks(n_tokens, beside=n_tokens)

    def _blocks(self, n_tokens: int, *, beside: int) -> int:
        """`beside` is the length of the longest sequence in the batch: windows are one rectangle in any case."""
        room = most_room(n_tokens) if self.in_rows else n_tokens + _SLACK_TOKENS
        return -(-(self._token_bytes * room + self._beside(beside)) // self.block_bytes)

    def prefix_blocks(self, n_tokens: int) -> int:
        """Blocks of a prefix that several sequences share, in rows of full attention only."""
        return -(-self._token_bytes * n_tokens // self.block_bytes)

    def longest_sequence(self, n_blocks: int) -> int:
        """Most tokens of a sequence that has `n_blocks` blocks to itself; 0 if not even one token fits."""
        low, high = 0, (n_blocks + 1) * BLOCK_TOKENS if self._token_bytes else 2**31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.sequence_blocks(middle) <= n_blocks else (low, middle - 1)
        return low

    @cached_property
    def _token_bytes(self) -> int:
        """Bytes of one token in all layers that may grow with the tokens, also in those that cannot be stored."""
        layers = [layer for layer in self.spec.layers if layer.kind in (LayerKind.FULL, LayerKind.UNKNOWN)]
        return sum(layer.elements_per_token for layer in layers) * ITEM_BYTES.get(self.spec.dtype, 4)

    def _beside(self, n_tokens: int) -> int:
        """Bytes of a sequence's windows and recurrent states at their largest: a prefill chunk widens a window."""
        n_bytes = 0
        for layer in self.spec.snapshot_layers:
            if layer.kind == LayerKind.WINDOW:
                kept = min(n_tokens + _SLACK_TOKENS, layer.window_tokens) + self.prefill_tokens
                n_bytes += kept * layer.elements_per_token * ITEM_BYTES[self.spec.dtype]
            else:
                n_bytes += sum(array.nbytes for array in layer.arrays)
        return n_bytes


class BlockPool:
    """`total` blocks, given to holders, in a time that does not depend on their number. `preemptions` counts the
    sequences that had to give theirs back before their end."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.preemptions = 0
        self._held: dict[Hashable, int] = {}
        self._used = 0

    @property
    def free(self) -> int:
        return self.total - self._used

    @property
    def used(self) -> int:
        return self._used

    def held(self, holder: Hashable) -> int:
        return self._held.get(holder, 0)

    def resize(self, holder: Hashable, blocks: int) -> bool:
        """Let `holder` hold `blocks` blocks from now on; ``False``, and nothing changes, if too few are free."""
        more = blocks - self._held.get(holder, 0)
        if more > self.free:
            return False
        self._held[holder] = blocks
        self._used += more
        return True

    def release(self, holder: Hashable) -> None:
        """Free all blocks that `holder` holds, if any."""
        self._used -= self._held.pop(holder, 0)
