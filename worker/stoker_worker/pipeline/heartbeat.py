"""The heartbeat thread: shows that this worker lives, and nothing else.

It has its own thread, and its own connection in the queue adapter, because no long prefill, slow disk, claim or hung
connection may delay it. So it is also the first to notice a Redis server that hangs.
"""

import logging
import threading
import time
from dataclasses import dataclass, replace

from stoker_shared.errors import RedisUnavailable
from stoker_worker.events import Outage
from stoker_worker.ports import QueuePort

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Away:
    """The outages; replaced as a whole, because other threads read it. `before_s`: the duration of those that are over.
    `since`: `time.monotonic()` at which the present one began; ``None``: there is none."""

    before_s: float = 0.0
    since: float | None = None

    def now_s(self) -> float:
        return 0.0 if self.since is None else time.monotonic() - self.since


class Heartbeat(threading.Thread):
    """Beats every `period_s` seconds until it is finished, or another worker has taken over."""

    def __init__(self, queue: QueuePort, *, period_s: float, outage: Outage | None = None) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._queue = queue
        self._period_s = period_s
        self._outage = outage or Outage("Redis")
        self._stop_asked = threading.Event()
        self._away = _Away()
        self.deposed = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(self._period_s):
            began = time.monotonic()
            try:
                if not self._queue.beat():
                    log.error("another worker has taken over the queue")
                    self.deposed.set()
                    return
                self._away = _Away(self.redis_away_total_s())
                self._outage.answered()
            except RedisUnavailable as error:
                self._away = replace(self._away, since=self._away.since or began)
                self._outage.met(error)
            except Exception:  # a worker without a heartbeat would be taken for dead
                log.exception("no heartbeat this time")

    def redis_away_s(self) -> float:
        """How long no beat has reached Redis; 0 when the last one did. Any thread."""
        return self._away.now_s()

    def redis_away_total_s(self) -> float:
        """The duration of all outages, the present one included. Any thread."""
        away = self._away
        return away.before_s + away.now_s()

    def finish(self) -> None:
        self._stop_asked.set()
