"""How much prefill goes into one step, and which steps have none. Pure; engine thread.

The budget is in seconds, because 512 tokens take 10 ms on one machine and 4 s on another, and every decoding sequence
waits for them, as does a cancel. A pass over the weights has a cost of its own, however few tokens it takes along, so
decoding sequences gain from steps without any prefill, not from small chunks.
"""

from typing import Final

_FIRST_TOKENS: Final = 64
_LEAST_TOKENS: Final = 16
_MOST_GROWTH: Final = 4
"""A chunk is at most so many times as large as the largest one measured: small chunks predict large ones badly."""

_FILLING: Final = 2
"""A step may take so many times the limit while a batch fills up: short steps would leave it half empty for longer, and
few sequences decode meanwhile. A cancel waits no longer than that either."""

_NEWEST: Final = 0.3
"""Weight of the newest measurement in the running averages."""

_MARGIN: Final = 1.2
"""Decoding gets so many times its half, because steps vary in length."""


class PrefillBudget:
    """Measures steps, and sets how many prompt tokens of each sequence the next one takes."""

    def __init__(self, max_step_s: float, most_tokens: int) -> None:
        """
        Args:
            max_step_s: most seconds of prefill in one step, except while a batch fills up.
            most_tokens: most tokens of one sequence in one step, whatever their time.
        """
        self._max_step_s = max_step_s
        self._most_tokens = most_tokens
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._largest = 0
        self._owed_s = 0.0  # to the decoding sequences

    def chunk_tokens(self, *, decoding: int, prefilling: int, waiting: int) -> int:
        """Tokens of each sequence in prefill for the next step; 0 for a step that only decodes."""
        if decoding and self._owed_s > 0:
            return 0
        if self._token_s is None:
            return min(_FIRST_TOKENS, self._most_tokens)
        most_s = self._max_step_s * (1 if _share(decoding, prefilling + waiting) else _FILLING)
        tokens = min(most_s / self._token_s, _MOST_GROWTH * self._largest) / max(1, prefilling)
        return max(min(_LEAST_TOKENS, self._most_tokens), min(self._most_tokens, int(tokens)))

    def note(self, step_s: float, *, decoding: int, wanting: int, prefill_tokens: int) -> None:
        """Learn from a step.

        Args:
            decoding: sequences that decoded in it.
            wanting: sequences in prefill, and those that wait for a place.
            prefill_tokens: prompt tokens of all sequences.
        """
        if prefill_tokens == 0:
            self._decode_s = _average(self._decode_s, step_s)
            self._owed_s = max(0.0, self._owed_s - step_s)
            return
        # The step's decode and prefill run in one queue and can only be measured together.
        decode_s = min(self._decode_s or 0.0, step_s) if decoding else 0.0
        prefill_s = max(step_s - decode_s, 0.1 * step_s)
        self._token_s = _average(self._token_s, prefill_s / prefill_tokens)
        self._largest = max(self._largest, prefill_tokens)
        self._owed_s = max(0.0, _MARGIN * prefill_s * _share(decoding, wanting) - decode_s)


def _share(decoding: int, wanting: int) -> float:
    """Seconds of decoding owed for a second of prefill: one when twice as many sequences decode as want prefill.

    Zero when as many want it: a batch that is half empty gains more from new sequences than from the speed of its few.
    """
    return min(1.0, max(0.0, decoding / max(1, wanting) - 1.0))


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWEST) * old + _NEWEST * new
