"""Remembers which blocks the prompts of jobs without an agent began with. Pure; loader thread.

Such a job has no next turn, so only a beginning that another job has too is worth writing: otherwise a hundred thousand
single prompts would fill the disk with blocks that are never read.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

_MOST_BLOCKS: Final = 2**15


class SharedPrefixes:
    """Forgets the blocks seen longest ago first."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._seen: OrderedDict[str, None] = OrderedDict()

    def note(self, addresses: Sequence[str]) -> int:
        """Remember a prompt's full blocks; returns how many of them, from the first on, an earlier prompt had."""
        n_shared = sum(1 for _ in takewhile(self._seen.__contains__, addresses))
        for address in reversed(addresses):  # a block is of use only after those before it, so the first goes last
            self._seen[address] = None
            self._seen.move_to_end(address)
        while len(self._seen) > self._most_blocks:
            self._seen.popitem(last=False)
        return n_shared
