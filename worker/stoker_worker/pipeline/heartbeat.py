"""The heartbeat thread: shows that this worker lives, and nothing else.

It has a thread of its own, and the queue adapter a connection of its own for it, because no long prefill, slow disk,
claim or hung connection may delay it. So it is also the first to know whether Redis is away.
"""

import logging
import threading
import time

from stoker_shared.errors import RedisUnavailable
from stoker_worker.ports import QueuePort

log = logging.getLogger(__name__)


class Heartbeat(threading.Thread):
    """Beats every `period_s` seconds until it is finished, or another worker has taken over."""

    def __init__(self, queue: QueuePort, *, period_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._queue = queue
        self._period_s = period_s
        self._stop_asked = threading.Event()
        self._away_since: float | None = None
        self.deposed = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(self._period_s):
            began = time.monotonic()
            try:
                if not self._queue.beat():
                    log.error("another worker has taken over the queue")
                    self.deposed.set()
                    return
                self._away_since = None
            except RedisUnavailable as error:
                self._away_since = self._away_since or began
                log.warning("no heartbeat: %s", error)
            except Exception:  # a worker without a heartbeat would be taken for dead
                log.exception("no heartbeat this time")

    def redis_away_s(self) -> float:
        """For how long no beat has reached Redis; 0 when the last one did. Any thread."""
        away_since = self._away_since
        return 0.0 if away_since is None else time.monotonic() - away_since

    def finish(self) -> None:
        self._stop_asked.set()
