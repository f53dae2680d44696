"""How much prefill goes into one step. Pure; engine thread.

Bounded in seconds, because tokens say nothing of a machine: the same 512 tokens take 10 ms on one and 4 s on another,
and every row that decodes waits for them, as does a cancel.
"""

from typing import Final

_FIRST_TOKENS: Final = 64
_LEAST_TOKENS: Final = 16
_NEWEST: Final = 0.3
"""Weight of the newest measurement in the running averages."""

_SHARE: Final = 0.8
"""Of a decode step's time, so that rows keep half their speed also when a chunk takes longer than the last one."""


class PrefillPace:
    """Measures steps and says how many prompt tokens of each row the next one may take."""

    def __init__(self, max_step_s: float, most_tokens: int) -> None:
        """
        Args:
            max_step_s: most seconds of prefill in one step.
            most_tokens: most tokens of one row in one step, whatever the time.
        """
        self._max_step_s = max_step_s
        self._most_tokens = most_tokens
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def chunk_tokens(self, *, decoding: int, prefilling: int, waiting: int) -> int:
        """Tokens of each row in prefill for the next step, with `waiting` rows still to come."""
        if self._token_s is None:
            return min(_FIRST_TOKENS, self._most_tokens)
        budget_s = self.budget_s(decoding=decoding, prefilling=prefilling + waiting)
        tokens = budget_s / (self._token_s * max(1, prefilling))
        return max(min(_LEAST_TOKENS, self._most_tokens), min(self._most_tokens, int(tokens)))

    def budget_s(self, *, decoding: int, prefilling: int) -> float:
        """Seconds of prefill for the next step: about as much as decoding has, more when more rows need it."""
        if decoding == 0 or self._decode_s is None:
            return self._max_step_s
        return min(self._max_step_s, _SHARE * self._decode_s * max(1.0, prefilling / decoding))

    def note(self, step_s: float, *, decoding: int, prefill_tokens: int) -> None:
        """Learn from a step.

        Args:
            prefill_tokens: rows times the longest chunk: what the model went through, padding included.
        """
        if prefill_tokens == 0:
            self._decode_s = _average(self._decode_s, step_s)
            return
        # The step's decode and prefill run in one queue and are only seen together.
        prefill_s = max(step_s - (self._decode_s or 0.0 if decoding else 0.0), 0.1 * step_s)
        self._token_s = _average(self._token_s, prefill_s / prefill_tokens)


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWEST) * old + _NEWEST * new
