"""Counts 256-token blocks of KV memory against a budget. Pure bookkeeping: no arrays, no MLX; engine thread.

Owns who holds how many blocks. What a row costs is `pricing`'s business, who may come in or has to go is the engine's.
"""


class BlockPool:
    """`total` blocks, handed to rows by uid. Every call takes the same time, however many blocks there are."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[int, int] = {}
        self._used = 0

    @property
    def free(self) -> int:
        return self.total - self._used

    @property
    def used(self) -> int:
        return self._used

    def held(self, uid: int) -> int:
        """Blocks that `uid` holds."""
        return self._held.get(uid, 0)

    def resize(self, uid: int, blocks: int) -> bool:
        """Let `uid` hold `blocks` blocks from now on; ``False``, and nothing changed, when too few are free."""
        more = blocks - self._held.get(uid, 0)
        if more > self.free:
            return False
        self._held[uid] = blocks
        self._used += more
        return True

    def release(self, uid: int) -> None:
        """Give back what `uid` holds; nothing when it holds nothing."""
        self._used -= self._held.pop(uid, 0)
