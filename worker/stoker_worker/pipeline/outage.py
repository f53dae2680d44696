"""What the log says while Redis is away: one line when it begins, and one when it is over. Any thread."""

import logging
import threading
import time
from typing import Final

from stoker_shared.errors import RedisUnavailable

log = logging.getLogger(__name__)

_QUIET_S: Final = 1.5
"""Three pauses between two tries: a server that answers one call and refuses the next is still in its outage."""


class Outage:
    """Every thread that meets an outage says so here, and the heartbeat says when Redis has answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: float | None = None
        self._last = 0.0

    def met(self, error: RedisUnavailable) -> None:
        with self._lock:
            self._last = time.monotonic()
            if self._began is not None:
                return
            self._began = self._last
        log.warning("outage begins: %s; running jobs go on", error)

    def answered(self) -> None:
        """A call has succeeded."""
        with self._lock:
            now = time.monotonic()
            if self._began is None or now - self._last < _QUIET_S:
                return
            seconds, self._began = now - self._began, None
        log.warning("outage over: Redis works again after %.1f s", seconds)
