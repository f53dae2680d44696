"""The sequences that a model is tried with before it is served: their number, lengths and cuts. Pure; owns no model.

Every fault of a batch found so far shows with one of these: sequences of unequal length prefilled together (padding on
the right), sequences that join later (padding on the left), as many sequences as there are KV heads (a mask broadcast
along the wrong axis), sequences longer than a window or a sparse budget, prefill in several chunks, and restored
sequences. Rows have two plans more: in one they lie in two groups, in the other they begin alike and repeat themselves.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from stoker_worker.engine.rows.room import MOST_APART
from stoker_worker.engine.shared_beginning import LEAST_SHARED

SHORTEST_SPAN: Final = 12
"""Every plan crosses so many tokens."""

MOST_AFTER_SPAN: Final = 30
"""A sequence has at most so many tokens after its prompt."""

_PROMPTS: Final = (6, 13, 9, 16, 7, 11, 8)
"""Lengths of prompts that need not cross anything, used in turn."""

_IN_TWO_GROUPS: Final = (6, 6 + MOST_APART + 26, 9, 6 + MOST_APART + 10)
"""Lengths of prompts of which two and two lie together in rows. Those of a group are so unequal that a missing mask
shows."""

_ANSWERS: Final = (3, 5, 4)
"""Tokens of the first answers: sequences end at different steps, so the batch goes through other widths as well."""

_LONG_ANSWER: Final = 14
"""Tokens of the longest sequence's answer: it still decodes when those that join are prefilled, or nothing would be
padded to its length."""

_MORE: Final = (5, 2, 9, 3)
"""Tokens that the second turn adds."""

SECOND_ANSWER: Final = 3
_JOINERS: Final = 2

_IN_COMMON: Final = LEAST_SHARED + 40
"""Tokens with which sequences begin alike: most are held once, and the rest is copied."""

_REPEATED: Final = 12
"""Tokens that these repeat in their prompts, so that they get drafts where those are on."""


@dataclass(frozen=True)
class TrialSequence:
    """Two turns of one sequence. All its tokens are fixed beforehand, those of its answers included.

    Attributes:
        ids: prompt, answer, the second turn's new tokens, second answer.
        n_prompt, n_answer: of the first turn.
        joins: whether it joins while others decode.
    """

    ids: tuple[int, ...]
    n_prompt: int
    n_answer: int
    joins: bool

    @property
    def n_first(self) -> int:
        """Tokens after the first turn."""
        return self.n_prompt + self.n_answer

    @property
    def n_second_prompt(self) -> int:
        return len(self.ids) - SECOND_ANSWER


@dataclass(frozen=True)
class TrialPlan:
    """
    Attributes:
        sequences: in the order in which they join.
        chunk_tokens: prompt tokens of a sequence in one step.
        shares: whether sequences that begin alike may share their beginning.
    """

    sequences: tuple[TrialSequence, ...]
    chunk_tokens: int
    shares: bool = False

    @property
    def longest(self) -> int:
        return max(len(sequence.ids) for sequence in self.sequences)

    @property
    def n_tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


def plan(
    text_ids: Sequence[int], *, kv_heads: Collection[int], max_batch: int, span: int = SHORTEST_SPAN, most: int
) -> TrialPlan:
    """A plan in which three sequences of unequal length cross `span`, if so many may run: from the start, while it
    decodes, and as a joiner, which is padded.

    Args:
        text_ids: token ids of some text, at least 64; each sequence begins at another place in it.
        kv_heads: numbers of KV heads among the model's layers.
        span: tokens; at least `SHORTEST_SPAN`, and `MOST_AFTER_SPAN` less than `most`.
        most: tokens that a sequence may have.
    """
    width = min(max_batch, max([2, *kv_heads]))
    joiners = min(_JOINERS, max_batch)
    lengths = [(_PROMPTS[i % len(_PROMPTS)], _ANSWERS[i % len(_ANSWERS)]) for i in range(width + joiners)]
    lengths[width - 2] = span - 2, _LONG_ANSWER // 2  # crosses the span while it decodes
    lengths[width - 1] = min(span + span // 3 + 3, max(span + 6, most - MOST_AFTER_SPAN)), _LONG_ANSWER
    for i in range(width, len(lengths)):  # of unequal length, so that not every padding is a multiple of a block
        lengths[i] = span + 5 + 4 * (i - width), 9 - 2 * (i - width)
    return _with_chunks([_sequence(text_ids, i, *length, joins=i >= width) for i, length in enumerate(lengths)])


def plan_in_two_groups(text_ids: Sequence[int]) -> TrialPlan:
    """For rows: two short sequences and two long ones, more than `MOST_APART` tokens apart."""
    return _with_chunks([_sequence(text_ids, i, n, _ANSWERS[i % len(_ANSWERS)]) for i, n in enumerate(_IN_TWO_GROUPS)])


def plan_of_alike(text_ids: Sequence[int]) -> TrialPlan:
    """For rows of full attention: sequences that begin alike, one of which joins, and whose answers repeat what the
    prompt has, but for the last token."""
    common = _text(text_ids, 0, _IN_COMMON)
    sequences = []
    for number, n_apart in enumerate((5, 19, 11)):
        own = _text(text_ids, 17 * (number + 1), n_apart)
        again = common[_IN_COMMON - 3 * _REPEATED :][: 2 * _REPEATED]
        more = _text(text_ids, 29 * number, 1 + _MORE[number] + SECOND_ANSWER)
        ids = (*common, *own, *again, *more)
        n_prompt = _IN_COMMON + n_apart + _REPEATED
        sequences.append(TrialSequence(ids, n_prompt, _REPEATED + 1, joins=number == 2))
    return TrialPlan(tuple(sequences), chunk_tokens=LEAST_SHARED // 2 + 3, shares=True)


def _with_chunks(sequences: Sequence[TrialSequence]) -> TrialPlan:
    longest = max(sequence.n_prompt for sequence in sequences)
    # Neither a whole prompt, nor half of one, nor a divisor of a window: cuts fall everywhere.
    return TrialPlan(tuple(sequences), chunk_tokens=max(4, 3 * longest // 5))


def _sequence(
    text_ids: Sequence[int], number: int, n_prompt: int, n_answer: int, *, joins: bool = False
) -> TrialSequence:
    n_tokens = n_prompt + n_answer + _MORE[number % len(_MORE)] + SECOND_ANSWER
    return TrialSequence(_text(text_ids, 17 * number, n_tokens), n_prompt, n_answer, joins)


def _text(text_ids: Sequence[int], start: int, n_tokens: int) -> tuple[int, ...]:
    # Each repetition of the text begins one token later, or a long sequence would repeat one short text.
    return tuple(text_ids[(start + i + i // len(text_ids)) % len(text_ids)] for i in range(n_tokens))
