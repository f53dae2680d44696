"""Which rows of a step get drafts, and how much of each draft is right. Engine thread.

Owns the width of a pass with drafts. A draft is right as far as it equals what the row draws itself, token by token: so
a row's tokens are the same with and without drafts.
"""

from collections.abc import Sequence
from typing import Any, Final

from stoker_worker.engine.rows.row import Row

MOST_ROWS: Final = 4
"""More rows get no drafts: so many fill a pass as they are, and few of them repeat themselves at the same time."""

_MOST_DRAFTED: Final = 7
"""Tokens of a draft."""

_MOST_INPUTS: Final = 16
"""Inputs of a pass: rows and drafted tokens. A wider pass takes longer for each input."""


class Drafts:
    """
    Attributes:
        n_drafted, n_accepted: tokens so far.
    """

    def __init__(self) -> None:
        self.n_drafted = self.n_accepted = 0

    def of_step(self, order: Sequence[Row], next_tokens: Any) -> dict[Row, list[int]]:
        """The drafts of a step, for the rows that get one.

        Waits for the pass before only if a row repeats itself: else it is dispatched first and read later.
        """
        if len(order) > MOST_ROWS:
            return {}
        for row in order:
            row.lookup.follow(row.tokens)
        if not any(row.lookup.is_repeating for row in order):
            return {}
        repeating = []
        for row, token in zip(order, next_tokens.tolist(), strict=True):
            row.lookup.add(token)
            if row.guide is not None:
                continue  # it tells what may follow a token only once that is drawn
            # None in a row's first step: a row that has ended may be here for its last token only.
            if row.lookup.is_repeating and row.has_generated and row.n_left > 1 and token not in row.end_ids:
                repeating.append(row)
        found = {}
        for row in repeating:
            most = min(_MOST_DRAFTED, (_MOST_INPUTS - len(order)) // len(repeating), row.n_left - 1)
            draft = row.lookup.draft(most)
            if row.end_ids.isdisjoint(draft):
                found[row] = draft
        return found

    def accepted(self, row: Row, draft: Sequence[int], drawn: Sequence[int]) -> int:
        """How many tokens of a draft are right.

        Args:
            drawn: what the row draws after each of its inputs.
        """
        n = next((i for i, (token, own) in enumerate(zip(draft, drawn, strict=False)) if token != own), len(draft))
        row.lookup.note(len(draft), n)
        self.n_drafted += len(draft)
        self.n_accepted += n
        return n
