"""Counts 256-token blocks of KV memory against a budget. Pure bookkeeping: no arrays, no MLX; engine thread.

Owns how many blocks each sequence holds, and each prefix that several share. Their cost is `kv_cost`'s; admission and
preemption are the scheduler's.
"""

from collections.abc import Hashable


class BlockPool:
    """`total` blocks, given to holders. Every call takes the same time, however many blocks there are.

    Attributes:
        preemptions: how often a sequence had to give its blocks back before its end.
    """

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
        """Blocks that `holder` holds."""
        return self._held.get(holder, 0)

    def resize(self, holder: Hashable, blocks: int) -> bool:
        """Let `holder` hold `blocks` blocks from now on; ``False``, and nothing changes, when too few are free."""
        more = blocks - self._held.get(holder, 0)
        if more > self.free:
            return False
        self._held[holder] = blocks
        self._used += more
        return True

    def release(self, holder: Hashable) -> None:
        """Free all blocks that `holder` holds, if any."""
        self._used -= self._held.pop(holder, 0)
