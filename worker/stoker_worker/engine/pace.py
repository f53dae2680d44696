"""How much prefill goes into one step, and which steps have none. Pure; engine thread.

Bounded in seconds, because tokens say nothing of a machine: the same 512 tokens take 10 ms on one and 4 s on another,
and every row that decodes waits for them, as does a cancel. A pass over the weights has a price of its own, however few
tokens it takes along, so rows that decode are not spared by small chunks but by steps without any.
"""

from typing import Final

_FIRST_TOKENS: Final = 64
_LEAST_TOKENS: Final = 16
_MOST_GROWTH: Final = 4
"""A chunk is at most so many times as large as the largest one measured: prices of small ones say little of it."""

_FILLING: Final = 2
"""Times the limit a step may take while a batch fills up: short steps would run it half empty for longer, and few rows
wait. A cancel waits no longer than that either."""

_NEWEST: Final = 0.3
"""Weight of the newest measurement in the running averages."""

_MARGIN: Final = 1.2
"""Decoding gets this much more than its half, because steps are never as long as the last ones were."""


class PrefillPace:
    """Measures steps and says how many prompt tokens of each row the next one may take."""

    def __init__(self, max_step_s: float, most_tokens: int) -> None:
        """
        Args:
            max_step_s: most seconds of prefill in one step, but for a batch that fills up.
            most_tokens: most tokens of one row in one step, whatever the time.
        """
        self._max_step_s = max_step_s
        self._most_tokens = most_tokens
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._largest = 0
        self._owed_s = 0.0  # to the rows that decode

    def chunk_tokens(self, *, decoding: int, prefilling: int, waiting: int) -> int:
        """Tokens of each row in prefill for the next step; 0 for a step that only decodes."""
        if decoding and self._owed_s > 0:
            return 0
        if self._token_s is None:
            return min(_FIRST_TOKENS, self._most_tokens)
        most_s = self._max_step_s * (1 if _share(decoding, prefilling + waiting) else _FILLING)
        tokens = min(most_s / self._token_s, _MOST_GROWTH * self._largest) / max(1, prefilling)
        return max(min(_LEAST_TOKENS, self._most_tokens), min(self._most_tokens, int(tokens)))

    def move_s(self, *, decoding: int) -> float:
        """Seconds that may be spent in the next step on moving a restored prefix."""
        if not decoding or self._decode_s is None:
            return self._max_step_s
        return min(self._max_step_s, self._decode_s / 2)

    def note(self, step_s: float, *, decoding: int, wanting: int, prefill_tokens: int) -> None:
        """Learn from a step.

        Args:
            decoding: rows that decoded in it.
            wanting: rows in prefill, and those that wait for a place.
            prefill_tokens: rows times the longest chunk: what the model went through, padding included.
        """
        if prefill_tokens == 0:
            self._decode_s = _average(self._decode_s, step_s)
            self._owed_s = max(0.0, self._owed_s - step_s)
            return
        # The step's decode and prefill run in one queue and are only seen together.
        decode_s = min(self._decode_s or 0.0, step_s) if decoding else 0.0
        prefill_s = max(step_s - decode_s, 0.1 * step_s)
        self._token_s = _average(self._token_s, prefill_s / prefill_tokens)
        self._largest = max(self._largest, prefill_tokens)
        self._owed_s = max(0.0, _MARGIN * prefill_s * _share(decoding, wanting) - decode_s)


def _share(decoding: int, wanting: int) -> float:
    """How much decoding is owed for a second of prefill: one when twice as many rows decode as want prefill.

    Nothing when as many want it: a batch that is half empty gains more from being filled than from its few rows' speed.
    """
    return min(1.0, max(0.0, decoding / max(1, wanting) - 1.0))


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWEST) * old + _NEWEST * new
