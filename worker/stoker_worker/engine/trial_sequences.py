"""The sequences that a model is tried with before it is served: their number, lengths and cuts. Pure; owns no model.

Every fault of a batch found so far shows with one of these: sequences of unequal length prefilled together (padding on
the right), sequences that join later (padding on the left), as many sequences as there are KV heads (a mask broadcast
along the wrong axis), sequences longer than a window or a sparse budget, prefill in several chunks, and restored
sequences. Rows have a second plan, in which they lie in two groups.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from stoker_worker.engine.rows.room import MOST_APART

_PROMPTS: Final = (19, 6, 13, 9, 16, 7, 11, 8)
"""Lengths of prompts where no window has to be crossed, used in turn."""

_IN_TWO_GROUPS: Final = (6, 6 + MOST_APART + 26, 9, 6 + MOST_APART + 10)
"""Lengths of prompts of which two and two lie together in rows. Those of a group are so unequal that a missing mask
shows."""

_ANSWERS: Final = (3, 5, 4)
"""Tokens of the first answers: sequences end at different steps, so the batch goes through other widths as well."""

_MORE: Final = (5, 2, 9, 3)
"""Tokens that the second turn adds."""

SECOND_ANSWER: Final = 2
_JOINERS: Final = 2


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
    """

    sequences: tuple[TrialSequence, ...]
    chunk_tokens: int

    @property
    def longest(self) -> int:
        return max(len(sequence.ids) for sequence in self.sequences)

    @property
    def n_tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


def plan(text_ids: Sequence[int], *, kv_heads: Collection[int], max_batch: int, span: int) -> TrialPlan:
    """
    Args:
        text_ids: token ids of some text, at least 64; each sequence begins at another place in it.
        kv_heads: numbers of KV heads among the model's layers.
        span: a window or sparse budget in tokens that some sequences have to cross; 0 for none.
    """
    width = min(max_batch, max([2, *kv_heads]))
    joiners = min(_JOINERS, max_batch)
    sequences = [
        _sequence(text_ids, number, _prompt_tokens(number, width, span), joins=number >= width)
        for number in range(width + joiners)
    ]
    return _with_chunks(sequences)


def plan_in_two_groups(text_ids: Sequence[int]) -> TrialPlan:
    """For rows: two short sequences and two long ones, more than `MOST_APART` tokens apart."""
    return _with_chunks([_sequence(text_ids, i, n, joins=False) for i, n in enumerate(_IN_TWO_GROUPS)])


def _with_chunks(sequences: Sequence[TrialSequence]) -> TrialPlan:
    longest = max(sequence.n_prompt for sequence in sequences)
    # Neither a whole prompt, nor half of one, nor a divisor of a window: cuts fall everywhere.
    return TrialPlan(tuple(sequences), chunk_tokens=max(4, 3 * longest // 5))


def _prompt_tokens(number: int, width: int, span: int) -> int:
    short = _PROMPTS[number % len(_PROMPTS)]
    if not span:
        return short
    if number == 0:
        return span + span // 3 + 3
    if number == 1 and width > 2:
        return max(2, span - 2)  # crosses the span while it decodes
    return span + 5 if number == width else short


def _sequence(text_ids: Sequence[int], number: int, n_prompt: int, *, joins: bool) -> TrialSequence:
    n_answer = _ANSWERS[number % len(_ANSWERS)]
    n_tokens = n_prompt + n_answer + _MORE[number % len(_MORE)] + SECOND_ANSWER
    start = 17 * number
    # Each repetition of the text begins one token later, or a long sequence would repeat one short text.
    ids = tuple(text_ids[(start + i + i // len(text_ids)) % len(text_ids)] for i in range(n_tokens))
    return TrialSequence(ids, n_prompt, n_answer, joins)
