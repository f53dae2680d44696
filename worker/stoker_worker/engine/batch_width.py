"""How many sequences may run together: fewer for a while after a step that broke, for good after a second one. Pure.

A step may break because of one sequence in it, or because so many cannot run together. The engine finds out which by
running fewer and fewer. Breaks are recorded by the number of sequences, until a sequence in them is found to break
alone.
"""

import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Final

_QUIET_STEPS: Final = 64
"""After so many steps without a break, twice as many sequences may run together."""

_MOST_BREAKS: Final = 2
"""A width that breaks so often, without a sequence to blame, is not tried again."""

_log = logging.getLogger(__name__)


class BatchWidth:
    """
    Attributes:
        now: most sequences that may run together now.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._quiet_steps = 0
        self._breaks: dict[int, list[frozenset[int]]] = defaultdict(list)
        self.now = most

    @property
    def most(self) -> int:
        """Most sequences that may ever run together again."""
        bad = [width for width, breaks in self._breaks.items() if len(breaks) >= _MOST_BREAKS]
        return min([self._most, *(width - 1 for width in bad)])

    @property
    def is_searching(self) -> bool:
        """Whether the cause of a broken step is still searched."""
        return self.now < self.most

    def broke(self, uids: Collection[int]) -> None:
        """A step of the sequences `uids` broke: half as many may run together from here on."""
        n, before = len(uids), self.most
        self.now, self._quiet_steps = max(1, min(self.now, n) // 2), 0
        if n > 1:
            self._breaks[n].append(frozenset(uids))
        if self.most < before:
            cannot = "cannot batch this model: " if self.most == 1 else ""
            _log.error("%s%d sequences together broke twice; at most %d from now on", cannot, n, self.most)

    def blame(self, uid: int) -> None:
        """The sequence `uid` breaks alone too: the steps with it did not break because of their width."""
        self._breaks = defaultdict(
            list, {width: [uids for uids in breaks if uid not in uids] for width, breaks in self._breaks.items()}
        )

    def went_well(self) -> None:
        """A step did not break: after enough of those, more sequences may run together."""
        self._quiet_steps += 1
        if self.is_searching and self._quiet_steps >= _QUIET_STEPS:
            self.now, self._quiet_steps = min(self.most, 2 * self.now), 0
