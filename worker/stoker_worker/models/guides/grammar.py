"""A compiled grammar and its place in one answer. One thread at a time; no MLX.

llguidance's matcher does not raise: after an error, it stays in a state of error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker_worker.ports.engine import TokenMask


class Grammar:
    """llguidance's matcher, with the model's own end-of-sequence tokens."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int]) -> None:
        """
        Args:
            matcher: an `llguidance.LLMatcher` at its beginning.
            eos_ids: they end an answer that is complete, whether the matcher knows them or not.
        """
        self._matcher = matcher
        self._eos_ids = np.array(sorted(eos_ids))

    def fork(self) -> "Grammar":
        """A copy at the same place."""
        return Grammar(self._matcher.deep_copy(), frozenset(self._eos_ids.tolist()))

    @property
    def problem(self) -> str | None:
        """Why it cannot go on, in one line."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().split("\n", 1)[0].strip() or "no reason given"

    def start(self, tokens: Sequence[int]) -> None:
        self._matcher.reset()
        self._matcher.consume_tokens(list(tokens))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def mask(self) -> TokenMask:
        """The tokens that may come next; an answer that is complete may also end."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        n_words = max(len(words), int(self._eos_ids.max(initial=0)) // 32 + 1)
        mask = np.zeros(n_words, np.uint32)
        if not self._matcher.is_stopped():
            mask[: len(words)] = words
        if self._matcher.is_accepting():
            allow(mask, self._eos_ids)
        return mask


def allows(mask: TokenMask, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def allow(mask: TokenMask, ids: "np.ndarray[Any, Any]") -> None:
    """Set the bits of `ids`, which `mask` has room for."""
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))


def forbid(mask: TokenMask, ids: "np.ndarray[Any, Any]") -> None:
    """Clear the bits of `ids`, as far as `mask` has them."""
    inside = ids[ids < 32 * len(mask)]
    np.bitwise_and.at(mask, inside // 32, ~(np.uint32(1) << (inside % 32).astype(np.uint32)))
