"""Prompts that begin alike: one sequence prefills the beginning, and it is in memory once. Pure.

Owns the search for a sequence that begins alike; engine thread. Without it, agents with one system prompt that arrive
together would each prefill it, and each hold it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_worker.engine.sequence import Sequence

LEAST_TOKENS: Final = 64
"""Fewer tokens are prefilled sooner than they are waited for."""

LEAST_SHARED: Final = 256
"""Fewer tokens are copied: rows with so little before them lie together in one array anyway."""

_STEP: Final = 64
"""A shared prefix is so many tokens or a multiple: after a system prompt, prompts go on alike by chance for a few."""


@dataclass(frozen=True)
class Beginning:
    """The first `n_tokens` tokens of `waiting`, which are those of `of` as well: a sequence in the batch."""

    waiting: Sequence
    of: Sequence
    n_tokens: int

    @property
    def is_prefilled(self) -> bool:
        return self.of.n_cached + self.of.n_prefilled >= self.n_tokens

    @property
    def n_shared(self) -> int:
        """How many of them need not be in memory twice. All that the two have after them is copied once; so 0, if that
        is more than they share."""
        n, n_to_split = self.n_tokens // _STEP * _STEP, self.of.n_tokens
        if self.of.prefix is not None:
            n, n_to_split = min(n, self.of.prefix.n_tokens), 0
        return n if n >= LEAST_SHARED and max(self.waiting.n_cached, n_to_split) <= 2 * n else 0


def shared_beginning(waiting: Sequence, in_batch: Iterable[Sequence]) -> Beginning | None:
    """The longest beginning that `waiting` has in common with a sequence in the batch, if it is worth it.

    If its own caches hold as much already, the beginning is no longer than they are, and prefilled.
    """
    key, wanted = waiting.work.shares, waiting.n_cached + LEAST_TOKENS
    least = min(wanted, LEAST_SHARED)
    if key is None or waiting.n_prompt <= least:
        return None
    others = (other for other in in_batch if other.work.shares == key)
    found = (Beginning(waiting, other, _n_common(waiting, other, least)) for other in others)
    best = max(found, key=lambda beginning: (beginning.n_tokens, beginning.is_prefilled), default=None)
    if best is None or best.n_tokens >= wanted:
        return best
    held = Beginning(waiting, best.of, min(best.n_tokens, waiting.n_cached))
    return held if held.is_prefilled and held.n_shared else None


def _n_common(waiting: Sequence, other: Sequence, least: int) -> int:
    """Common tokens, without the last one of the other prompt, which is never prefilled, and without those that
    `waiting` has to prefill itself; 0 if fewer than `least`.

    By halves, because comparing slices is much faster than comparing tokens.
    """
    if (known := waiting.n_common.get(other.uid)) is None:
        ours, theirs = waiting.work.prompt_ids, other.work.prompt_ids
        same, most = 0, min(waiting.n_reusable, len(theirs) - 1)
        if most >= least and ours[least - 1] == theirs[least - 1] and ours[:least] == theirs[:least]:
            same = least
            while same < most:
                middle = (same + most + 1) // 2
                same, most = (middle, most) if ours[same:middle] == theirs[same:middle] else (same, middle - 1)
        known = waiting.n_common[other.uid] = same
    return known
