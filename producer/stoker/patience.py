"""How long one wait goes on: its time limit, and a server that is away meanwhile. No I/O."""

import time

GIVE_UP_S = 60.0
"""Seconds without a server after which a wait without a time limit ends."""

_PAUSE_S = 0.2


class Patience:
    """One wait's, from its making on."""

    def __init__(self, timeout_s: float | None) -> None:
        """
        Args:
            timeout_s: how long to wait; ``None`` for as long as it takes.
        """
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._was_answered = False

    @property
    def left_s(self) -> float:
        """Infinity without a limit; below 0 when it is over."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()

    def was_answered(self) -> None:
        """The server is there."""
        self._was_answered, self._lost_at = True, None

    def pause_after_loss_s(self) -> float | None:
        """How long to pause before the server is asked again; ``None`` to give up.

        A server that was never there is given up at once: the address is probably wrong.
        """
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        gives_up_at = self._lost_at + GIVE_UP_S if self._deadline is None else self._deadline
        return min(_PAUSE_S, gives_up_at - now) if self._was_answered and now < gives_up_at else None
