"""Counts 256-token blocks of KV memory against a budget. Pure bookkeeping: no arrays, no MLX; engine thread.

A first, static policy: a sequence reserves the blocks of its whole prompt and of every token it may generate, so a
sequence that was let in can never outgrow the pool.
"""

from stoker_shared.errors import BlockPoolTooSmall
from stoker_worker.cache_spec import BLOCK_TOKENS


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """`total` blocks, handed to sequences by uid."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[int, int] = {}
        self._used = 0

    @classmethod
    def of_bytes(cls, max_bytes: int, bytes_per_block: int) -> "BlockPool":
        """As many blocks of all layers as fit into `max_bytes`."""
        return cls(max_bytes // max(1, bytes_per_block))

    @property
    def free(self) -> int:
        return self.total - self._used

    @property
    def used(self) -> int:
        return self._used

    def check(self, tokens: int) -> None:
        """
        Raises:
            BlockPoolTooSmall: a sequence of `tokens` tokens would not fit even into the empty pool.
        """
        if blocks_for(tokens) > self.total:
            raise BlockPoolTooSmall(
                f"prompt + max_tokens is {tokens} tokens; this worker's KV memory holds "
                f"{self.total * BLOCK_TOKENS} (--kv-max-bytes)"
            )

    def allocate(self, uid: int, tokens: int) -> bool:
        """Reserve the blocks of `tokens` tokens for `uid`; ``False``, and nothing reserved, when they are not free."""
        blocks = blocks_for(tokens)
        if blocks > self.free:
            return False
        if uid in self._held:
            raise ValueError(f"sequence {uid} holds blocks already")
        self._held[uid] = blocks
        self._used += blocks
        return True

    def release(self, uid: int) -> None:
        """Give back what `uid` holds; nothing when it holds nothing."""
        self._used -= self._held.pop(uid, 0)
