"""The log lines of an outage of Redis or of the store: one when it begins, and one when it is over. Any thread."""

import logging
import threading
import time
from typing import Final

log = logging.getLogger(__name__)

_QUIET_S: Final = 1.5
"""Three pauses between two tries: what answers one call and refuses the next is still in its outage."""


class Outage:
    """Every thread that meets an outage says so here, and one that calls regularly says when a call has succeeded."""

    def __init__(self, of: str) -> None:
        """
        Args:
            of: what fails, as the subject of a sentence.
        """
        self._of = of
        self._lock = threading.Lock()
        self._began: float | None = None
        self._last = 0.0

    @property
    def seconds(self) -> float:
        """How long it has lasted; 0: there is none."""
        with self._lock:
            return 0.0 if self._began is None else time.monotonic() - self._began

    def met(self, why: object) -> None:
        """
        Args:
            why: an error, or its text, for the log.
        """
        with self._lock:
            self._last = time.monotonic()
            if self._began is not None:
                return
            self._began = self._last
        log.warning("outage begins: %s; running jobs go on", why)

    def answered(self) -> None:
        """A call has succeeded."""
        with self._lock:
            now = time.monotonic()
            if self._began is None or now - self._last < _QUIET_S:
                return
            seconds, self._began = now - self._began, None
        log.warning("outage over: %s works again after %.1f s", self._of, seconds)
