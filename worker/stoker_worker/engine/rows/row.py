"""A row that decodes: its tokens so far, how its next ones are drawn, and drafts of them. Owns no keys and values.

A draft comes from the row itself: if its newest tokens occurred in it before, the tokens that followed them then may
follow again. It is kept as far as it equals what the row draws, so drafts do not change a row's tokens. Engine thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from stoker_worker.engine.rows.shared_prefix import SharedPrefix
from stoker_worker.ports import AnswerGuide

N: Final = 3
"""Tokens of the n-grams that are looked up."""

_LEAST_REPEATED: Final = 4
_MOST_REPEATED: Final = 64
"""A row gets a draft once so many of its newest tokens have occurred in it before, in the same order; twice as many
after each draft that was wrong from its first token, up to the most. So ordinary text pays for few drafts."""


class NgramLookup:
    """The n-grams of one row."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # of each n-gram: the place after its newest occurrence
        self._at = 0  # the place after the earlier occurrence of the newest tokens
        self._n_repeated = 0  # how many of the newest tokens occur before that place, too
        self._needed = _LEAST_REPEATED

    @property
    def is_repeating(self) -> bool:
        return self._n_repeated >= self._needed

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in those of a row's tokens that are new."""
        for token in tokens[len(self._tokens) :]:
            self.add(token)

    def add(self, token: int) -> None:
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
        """Up to `most` tokens that may come next, and no more than have been repeated. A cycle is repeated."""
        n, period = min(most, self._n_repeated), self._tokens[self._at : self._at + most]
        return (period * (n // len(period) + 1))[:n]

    def note(self, n_drafted: int, n_accepted: int) -> None:
        """Learn how much of a draft was right."""
        if n_accepted == n_drafted:
            self._needed = _LEAST_REPEATED
        elif not n_accepted:
            self._needed = min(2 * self._needed, _MOST_REPEATED)


@dataclass(eq=False)
class Row:
    """A sequence that decodes in rows.

    Attributes:
        tokens: those in its cache, the prefix included.
        sampler, processors, end_ids: as in `SequenceStart`.
        guide: as in `SequenceStart`; it follows the tokens that are fed.
        prefix: the beginning of its cache that other rows share.
        context: the tokens as an array, for processors.
        has_generated: whether its next token was generated; before that, it is the last one of the prompt.
        lookup: makes its drafts.
    """

    uid: int
    tokens: list[int]
    max_tokens: int
    sampler: Any
    processors: Sequence[Any]
    end_ids: frozenset[int]
    prefix: SharedPrefix | None = None
    guide: AnswerGuide | None = None
    context: Any = None
    has_generated: bool = False
    n_generated: int = 0
    lookup: NgramLookup = field(default_factory=NgramLookup)

    @property
    def n_own(self) -> int:
        """Its tokens after the prefix."""
        return len(self.tokens) - (0 if self.prefix is None else self.prefix.n_tokens)

    @property
    def n_left(self) -> int:
        return self.max_tokens - self.n_generated

    def begin_context(self) -> None:
        if self.processors:
            self.context = TokenBuffer(list(self.tokens))

    def take_back(self, n_drawn: int) -> None:
        """Forget its newest draws, which followed wrong drafts. `tokens` are right by now."""
        if n_drawn and self.sampler is not None:
            self.sampler.take_back(n_drawn)
        if n_drawn:
            self.begin_context()


MOST_ROWS: Final = 4
"""More rows get no drafts: they fill a pass as they are, and few of them repeat themselves at the same time."""

_MOST_DRAFTED: Final = 7
"""Tokens of a draft."""

_MOST_INPUTS: Final = 16
"""Inputs of a pass: rows and drafted tokens. A wider pass takes longer for each input."""


class Drafts:
    """Makes the drafts of a step, and counts their tokens."""

    def __init__(self) -> None:
        self.n_drafted = self.n_accepted = 0

    def of_step(self, order: Sequence[Row], next_tokens: Any) -> dict[Row, list[int]]:
        """The drafts of a step, for the rows that get one. Waits for the pass before only if a row repeats itself;
        otherwise this pass is dispatched before that one is read."""
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
                continue  # a guide knows what may follow a token only after that is drawn
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
        """How many tokens of a draft are right. `drawn`: the row's draws after each of its inputs."""
        n = next((i for i, (token, own) in enumerate(zip(draft, drawn, strict=False)) if token != own), len(draft))
        row.lookup.note(len(draft), n)
        self.n_drafted += len(draft)
        self.n_accepted += n
        return n


def processed(of_inputs: Sequence[Row], inputs: mx.array, logits: mx.array, contexts: list[mx.array]) -> mx.array:
    """Logits (inputs, vocabulary) after the rows' processors.

    Args:
        of_inputs: the row of each input; a row's inputs follow each other.
        inputs: token ids, (inputs,).
        contexts: gets the arrays to be computed with the result.
    """
    if not any(row.processors for row in of_inputs):
        return logits
    done = []
    for index, row in enumerate(of_inputs):
        row_logits = logits[index : index + 1]
        if row.processors:
            context = row.context.update_and_fetch(inputs[index : index + 1])
            contexts.append(context)
            for processor in row.processors:
                row_logits = processor(context, row_logits)
        done.append(row_logits)
    return mx.concatenate(done)


def drawn(of_inputs: Sequence[Row], logprobs: mx.array) -> mx.array:
    """Token ids, (inputs,), drawn by each input's row, in order. `logprobs`: (inputs, vocabulary), normalised."""
    likeliest = mx.argmax(logprobs, axis=-1)
    if all(row.sampler is None for row in of_inputs):
        return likeliest
    return mx.concatenate(
        [
            (row.sampler(logprobs[i : i + 1]) if row.sampler else likeliest[i : i + 1]).astype(mx.uint32)
            for i, row in enumerate(of_inputs)
        ]
    )
