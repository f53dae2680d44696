"""The waiting jobs that others have passed because their agents' caches were in RAM, and for how long that may go on.
Pure policy, no I/O; fetcher thread.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

MOST_PASSED: Final = 32
"""Places given from the first time that a job is passed over until it is passed no more: a few batches, so that a cache
serves several turns while it is in RAM. As many jobs are looked at for one place."""

MOST_PASSED_S: Final = 10.0
"""The same in seconds, for long jobs: a person who waits for an answer should not notice much of it."""

_MOST_KEPT: Final = 1024


class PassedOver:
    """When each job was passed over first: after how many places, and at what time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[str, tuple[int, float]] = {}

    def note(self, job_ids: Iterable[str], n_given: int) -> None:
        """These were passed over, after `n_given` places."""
        now = self._clock()
        for job_id in job_ids:
            self._first.setdefault(job_id, (n_given, now))
        while len(self._first) > _MOST_KEPT:  # the first of them left the queue while it was read anew
            del self._first[next(iter(self._first))]

    def forget(self, job_id: str) -> None:
        self._first.pop(job_id, None)

    def for_long(self, job_id: str, n_given: int) -> bool:
        """Whether the job may be passed over no more."""
        n_before, since = self._first.get(job_id, (n_given, self._clock()))
        return n_given - n_before >= MOST_PASSED or self._clock() - since >= MOST_PASSED_S
