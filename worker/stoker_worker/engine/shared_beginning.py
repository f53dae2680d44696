"""Prompts that begin alike: one sequence prefills the beginning, the others take copies of its cache. Pure.

Owns the search for the sequence to copy from; engine thread. Without it, agents with one system prompt that arrive
together would each prefill it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_worker.engine.sequence import Sequence

LEAST_TOKENS: Final = 64
"""Fewer tokens are prefilled sooner than they are waited for."""


@dataclass(frozen=True)
class Beginning:
    """The first `n_tokens` tokens of a waiting sequence, which are those of `of` as well."""

    of: Sequence
    n_tokens: int

    @property
    def is_prefilled(self) -> bool:
        return self.of.n_cached + self.of.n_prefilled >= self.n_tokens


def shared_beginning(waiting: Sequence, in_batch: Iterable[Sequence]) -> Beginning | None:
    """The longest beginning that `waiting` may take over from a sequence in the batch, if it is worth it."""
    key, least = waiting.work.shares, waiting.n_cached + LEAST_TOKENS
    if key is None or waiting.n_prompt <= least:
        return None
    found = (Beginning(other, _n_common(waiting, other, least)) for other in in_batch if other.work.shares == key)
    best = max(found, key=lambda beginning: (beginning.n_tokens, beginning.is_prefilled), default=None)
    return best if best is not None and best.n_tokens >= least else None


def _n_common(waiting: Sequence, other: Sequence, least: int) -> int:
    """Common tokens, without the last one of either prompt, which is never prefilled; 0 if fewer than `least`.

    By halves, because comparing slices is much faster than comparing tokens.
    """
    if (known := waiting.n_common.get(other.uid)) is None:
        ours, theirs = waiting.work.prompt_ids, other.work.prompt_ids
        same, most = 0, min(len(ours), len(theirs)) - 1
        if most >= least and ours[least - 1] == theirs[least - 1] and ours[:least] == theirs[:least]:
            same = least
            while same < most:
                middle = (same + most + 1) // 2
                same, most = (middle, most) if ours[same:middle] == theirs[same:middle] else (same, middle - 1)
        known = waiting.n_common[other.uid] = same
    return known
