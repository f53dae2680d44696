"""Where a row's newest tokens have stood in it before: what came after them there is a draft of what comes next.

Owns a row's n-grams, and how long it must repeat itself before it gets a draft. Pure: token ids only. Engine thread.
"""

from collections.abc import Sequence
from typing import Final

N: Final = 3
"""Tokens of the n-grams that are looked up."""

_LEAST_REPEATED: Final = 4
_MOST_REPEATED: Final = 64
"""A row gets a draft once so many of its newest tokens in a row have stood in it before; twice as many after each draft
that was wrong from its first token, up to the most. So ordinary text pays for few drafts."""


class NgramLookup:
    """The n-grams of one row."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # of each n-gram: the place after its newest occurrence
        self._at = 0  # the place after the earlier occurrence of the newest tokens
        self._n_repeated = 0  # how many of the newest tokens stand before that place as well
        self._needed = _LEAST_REPEATED

    @property
    def is_repeating(self) -> bool:
        """Whether the row gets a draft."""
        return self._n_repeated >= self._needed

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in those of a row's tokens that are new."""
        for token in tokens[len(self._tokens) :]:
            self.add(token)

    def add(self, token: int) -> None:
        """Take in the row's next token."""
        if self._n_repeated and self._tokens[self._at] == token:
            self._at += 1
            self._n_repeated += 1
        else:
            self._n_repeated = 0
        self._tokens.append(token)
        ngram = tuple(self._tokens[-N:])
        if not self._n_repeated and ngram in self._after:
            self._at, self._n_repeated = self._after[ngram], N
        self._after[ngram] = len(self._tokens)

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next, and no more than have been repeated. A cycle goes round."""
        n, period = min(most, self._n_repeated), self._tokens[self._at : self._at + most]
        return (period * (n // len(period) + 1))[:n]

    def note(self, n_drafted: int, n_accepted: int) -> None:
        """Learn how much of a draft was right."""
        if n_accepted == n_drafted:
            self._needed = _LEAST_REPEATED
        elif not n_accepted:
            self._needed = min(2 * self._needed, _MOST_REPEATED)
