"""Counts 256-token blocks of KV memory against a budget. Pure bookkeeping: no arrays, no MLX; engine thread.

Owns which sequence holds how many blocks. Their cost is `kv_cost`'s; admission and preemption are the scheduler's.
"""


class BlockPool:
    """`total` blocks, given to sequences by uid. Every call takes the same time, however many blocks there are."""

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
        """Let `uid` hold `blocks` blocks from now on; ``False``, and nothing changes, when too few are free."""
        more = blocks - self._held.get(uid, 0)
        if more > self.free:
            return False
        self._held[uid] = blocks
        self._used += more
        return True

    def release(self, uid: int) -> None:
        """Free all blocks that `uid` holds, if any."""
        self._used -= self._held.pop(uid, 0)
