"""Which beginnings of prompts have come up before, in jobs without an agent. Pure; loader thread.

Nobody comes back to the cache of such a job, so that only what another job begins with as well is worth writing: one
prompt of a hundred thousand would fill the disk with blocks that nobody reads.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

_MOST_BLOCKS: Final = 2**15


class SharedPrefixes:
    """The blocks that prompts began with, those longest ago forgotten first."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._seen: OrderedDict[str, None] = OrderedDict()  # by address: a path takes several times the memory

    def note(self, blocks: Sequence[Path]) -> int:
        """Take note of a prompt's full blocks; returns how many of them, from the first on, an earlier prompt had."""
        addresses = [path.stem for path in blocks]
        n_shared = sum(1 for _ in takewhile(self._seen.__contains__, addresses))
        for address in reversed(addresses):  # a chain is of use from its start only, so its start goes last
            self._seen[address] = None
            self._seen.move_to_end(address)
        while len(self._seen) > self._most_blocks:
            self._seen.popitem(last=False)
        return n_shared
