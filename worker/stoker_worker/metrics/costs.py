"""The seconds that the model needs for a token of a prompt and for one that it generates. Pure; `Metrics` calls it.

A step without prefill costs its seconds for the tokens that it generates. The others cost more, and the difference
is the prefill's. So a worker whose batch is full has cheap tokens: the figures are those of the load that it has.
"""

from typing import Final

_REMEMBERED_S: Final = 600.0
"""After so many seconds of steps, all that was seen before weighs half."""


class Costs:
    """Sums over the engine's steps and the prompts that ended. The caller has a lock."""

    def __init__(self) -> None:
        self._decode_s = self._mixed_s = 0.0
        self._decode_tokens = self._mixed_tokens = self._prefilled = 0.0

    def stepped(self, seconds: float, tokens: int, *, has_prefill: bool) -> None:
        """
        Args:
            tokens: generated in this step.
        """
        if has_prefill:
            self._mixed_s += seconds
            self._mixed_tokens += tokens
        else:
            self._decode_s += seconds
            self._decode_tokens += tokens
        if self._decode_s + self._mixed_s > _REMEMBERED_S:
            self._decode_s, self._decode_tokens = self._decode_s / 2, self._decode_tokens / 2
            self._mixed_s, self._mixed_tokens = self._mixed_s / 2, self._mixed_tokens / 2
            self._prefilled /= 2

    def prefilled(self, tokens: int) -> None:
        """A sequence ended whose prompt had so many tokens that were not in a cache."""
        self._prefilled += tokens

    def token_s(self) -> float | None:
        """Seconds for a generated token; ``None``: not known yet."""
        return self._decode_s / self._decode_tokens if self._decode_tokens else None

    def prompt_token_s(self) -> float | None:
        """Seconds for a token of a prompt; ``None``: not known yet."""
        token_s = self.token_s()
        if token_s is None or not self._prefilled:
            return None
        return max(0.0, self._mixed_s - self._mixed_tokens * token_s) / self._prefilled
