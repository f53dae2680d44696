"""A timer for periodic work, for one thread."""

import time


class Periodic:
    """Due at once, then whenever `period_s` seconds have passed since it was last due."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last = float("-inf")

    def make_due(self) -> None:
        self._last = float("-inf")

    def rest(self, seconds: float) -> None:
        """Be not due for this long."""
        self._last = max(self._last, time.monotonic() + seconds - self._period_s)

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._period_s:
            return False
        self._last = now
        return True
