"""When the worker leaves by itself: the queues are empty, it has run its share, or it has been idle. Fetcher thread."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Leaving:
    """Counts claimed jobs and idle time. Without any limit the worker stays until it is told to stop."""

    def __init__(self, *, burst: bool = False, max_jobs: int | None = None, max_idle_s: float | None = None) -> None:
        """
        Args:
            burst: leave as soon as the queues are empty and nothing is in flight.
            max_jobs: claim so many, and leave when they have ended.
            max_idle_s: leave when there was nothing to do for so long.
        """
        self._burst = burst
        self._jobs_left = max_jobs
        self._max_idle_s = max_idle_s
        self._idle_since: float | None = None

    def room(self, free: int) -> int:
        """How many of the free places may be filled."""
        return free if self._jobs_left is None else min(free, self._jobs_left)

    def claimed(self, n_jobs: int) -> None:
        if self._jobs_left is not None:
            self._jobs_left -= n_jobs

    def is_time(self, *, is_idle: bool, is_empty: Callable[[], bool]) -> bool:
        """
        Args:
            is_idle: nothing is in flight and nothing could be claimed.
            is_empty: asks Redis whether the queues are empty; they are not while they are suspended with jobs in them.
        """
        if not is_idle:
            self._idle_since = None
            return False
        if self._jobs_left == 0:
            log.info("leaving: as many jobs as --max-jobs allows have ended")
            return True
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        waited = self._max_idle_s is not None and now - self._idle_since >= self._max_idle_s
        if not (self._burst or waited) or not is_empty():
            return False
        if waited:
            log.info("leaving: nothing to do for %g s", self._max_idle_s)
        return True
