"""The limits of a step, learned from earlier steps: sequences that run together, and prefill. Pure; engine thread."""

import math
from typing import Final

_QUIET_STEPS: Final = 64
"""After so many steps without a break, twice as many sequences may run together; if that broke, after twice as many."""


class BatchWidth:
    """How many sequences may run together: `most` at any time, and `now` at present."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._quiet_steps = self._broke_at = 0
        self._needed_steps = _QUIET_STEPS // 2

    @property
    def is_searching(self) -> bool:
        """True while the cause of a broken step is unknown."""
        return self.now < self.most

    def broke(self, n_sequences: int) -> None:
        """A step of so many sequences broke: half as many may run together from here on."""
        self.now, self._quiet_steps = max(1, min(self.now, n_sequences) // 2), 0
        self._broke_at, self._needed_steps = n_sequences, 2 * self._needed_steps

    def blame_one(self) -> None:
        """One sequence breaks alone, too: the steps with it did not break because of their width."""
        self._needed_steps = _QUIET_STEPS

    def went_well(self, n_sequences: int) -> None:
        """A step of so many sequences did not break: after enough such steps, more may run together."""
        self._quiet_steps += 1
        if self._quiet_steps >= self._needed_steps:
            if not self.is_searching and n_sequences >= self._broke_at:
                self._needed_steps = _QUIET_STEPS // 2  # the cause of that break has passed
            self.now, self._quiet_steps = min(self.most, 2 * self.now), 0


_FIRST_TOKENS: Final = 64
_LEAST_TOKENS: Final = 16
_MOST_GROWTH: Final = 4
"""A chunk is at most so many times as large as the largest one measured: small chunks predict large ones badly."""

_FILLING: Final = 2
"""A step may take so many times the limit while a batch fills up: shorter steps would leave it half empty for longer,
and few sequences decode meanwhile. A cancel waits no longer, either, unless one pass takes longer by itself."""

_MOST_FIXED: Final = 0.9
"""The largest share of a pass that counts as its fixed cost: more is noise, and would predict chunks of any size."""

_UNLIKE: Final = 0.25
"""Chunks whose sizes deviate by less than this share of their mean show nothing about the fixed cost of a pass."""

_KEPT: Final = 0.95
"""So much of the fixed share is kept after a pass as large as those before: it is learned anew when sizes change."""

_NEWEST: Final = 0.3
"""Weight of the newest measurement in the running averages."""

_MARGIN: Final = 1.2
"""Decoding is owed so many times its share of the time, because steps vary in length."""


class PrefillBudget:
    """Measures steps, and decides how many prompt tokens of each sequence the next one takes."""

    def __init__(self, max_step_s: float, most_tokens: int) -> None:
        """`max_step_s` is the most seconds of prefill in one step; infinite: each takes `most_tokens`. It may be more
        while a batch fills up, and if a pass of few tokens takes more than half of it. `most_tokens` limits each
        sequence."""
        self._max_step_s = max_step_s
        self._most_tokens = most_tokens
        self._decode_s: float | None = None
        self._passes: tuple[float, ...] = ()  # averages of tokens, seconds, tokens squared, tokens times seconds
        self._fixed = 0.0  # share of a pass that is not due to its tokens
        self._largest = 0
        self._owed_s = 0.0  # to the decoding sequences

    def chunk_tokens(self, *, decoding: int, prefilling: int, waiting: int) -> int:
        """Tokens of each sequence in prefill for the next step; 0: the step only decodes."""
        if self._max_step_s == math.inf:
            return self._most_tokens
        if decoding and self._owed_s > 0:
            return 0
        if not self._passes:
            return min(_FIRST_TOKENS, self._most_tokens)
        most_s = self._max_step_s * (1 if _share(decoding, prefilling + waiting) else _FILLING)
        mean_tokens, mean_s, *_ = self._passes
        fixed_s = self._fixed * mean_s
        # If the fixed cost of a pass is more than half of the limit, the pass may take twice that cost.
        token_s = (mean_s - fixed_s) / mean_tokens
        tokens = min(max(most_s - fixed_s, fixed_s) / token_s, _MOST_GROWTH * self._largest) / max(1, prefilling)
        return max(min(_LEAST_TOKENS, self._most_tokens), min(self._most_tokens, int(tokens)))

    def note(self, step_s: float, *, decoding: int, wanting: int, prefill_tokens: int) -> None:
        """Learn from a step in which `decoding` sequences decoded. `wanting`: sequences in prefill, and those that wait
        for a place; `prefill_tokens`: prompt tokens of all sequences."""
        if prefill_tokens == 0:
            self._decode_s = _average(self._decode_s, step_s)
            self._owed_s = max(0.0, self._owed_s - step_s)
            return
        # The step's decode and prefill run in one queue and can only be measured together.
        decode_s = min(self._decode_s or 0.0, step_s) if decoding else 0.0
        prefill_s = max(step_s - decode_s, 0.1 * step_s)
        self._learn(prefill_tokens, prefill_s)
        self._largest = max(self._largest, prefill_tokens)
        self._owed_s = max(0.0, _MARGIN * prefill_s * _share(decoding, wanting) - decode_s)

    def _learn(self, tokens: int, seconds: float) -> None:
        """The fixed share of a pass, by least squares over the newest passes if their sizes differ enough."""
        newest = (tokens, seconds, tokens**2, tokens * seconds)
        self._passes = tuple(map(_average, self._passes or newest, newest))
        mean_tokens, mean_s, mean_square, mean_product = self._passes
        if (variance := mean_square - mean_tokens**2) > (_UNLIKE * mean_tokens) ** 2:
            token_s = (mean_product - mean_tokens * mean_s) / variance
            self._fixed = (self._fixed + min(_MOST_FIXED, max(0.0, 1 - token_s * mean_tokens / mean_s))) / 2
        else:
            self._fixed *= _KEPT


def _share(decoding: int, wanting: int) -> float:
    """Seconds of decoding owed for a second of prefill: one if twice as many sequences decode as want prefill; zero if
    as many do, because a half-empty batch gains more from new sequences than from the speed of its few."""
    return min(1.0, max(0.0, decoding / max(1, wanting) - 1.0))


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWEST) * old + _NEWEST * new
