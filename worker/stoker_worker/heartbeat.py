"""The heartbeat thread: shows that this worker lives, and nothing else.

It has a thread of its own, and the queue adapter a connection of its own for it, because no long prefill, slow disk,
claim or hung connection may delay it.
"""

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from stoker_worker.ports import QueuePort

log = logging.getLogger(__name__)


class Heartbeat(threading.Thread):
    """Beats every `period_s` seconds until stopped; calls `on_deposed` when another worker has taken over."""

    def __init__(self, queue: QueuePort, *, period_s: float, on_deposed: Callable[[], None]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._queue = queue
        self._period_s = period_s
        self._on_deposed = on_deposed
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(self._period_s):
            try:
                if not self._queue.beat():
                    log.error("another worker has taken over the queue")
                    self._on_deposed()
                    return
            except RedisError as error:
                log.warning("no heartbeat: Redis is away (%s)", type(error).__name__)
            except Exception:  # a worker without a heartbeat would be taken for dead
                log.exception("no heartbeat this time")

    def finish(self) -> None:
        self._stop_asked.set()
