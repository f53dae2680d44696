"""Notices that Redis has lost data: it was restarted without an append-only file, or flushed, or an old replica was
promoted.

Owns what was noticed. Redis numbers the renewals of a member's lease, and these numbers only grow. Any thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stoker_worker.ports import ClaimedJob, DataLoss

log = logging.getLogger(__name__)


class BeforeRenewal(NamedTuple):
    """What was known when a renewal was sent: how often data was lost, and the highest number."""

    times: int
    highest: int


class LostData:
    """Compares each renewal's number with the ones before it."""

    def __init__(
        self,
        in_flight: Callable[[], Sequence[ClaimedJob]] = tuple,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._lock = threading.Lock()
        self._times = self._jobs = self._highest = 0
        self._last_claim = -1
        self._noticed_at = float("-inf")

    def before_renewal(self) -> BeforeRenewal:
        with self._lock:
            return BeforeRenewal(self._times, self._highest)

    def renewed(self, number: int, before: BeforeRenewal) -> None:
        """
        Args:
            before: from before the renewal was sent. Renewals of several threads may be answered in another order.
        """
        with self._lock:
            if before.times != self._times:  # another thread has noticed the loss, before or after this renewal
                return
            if number > before.highest:
                self._highest = max(self._highest, number)
                return
            claims = [job.claim_number for job in self._in_flight()]
            self._times, self._jobs, self._highest = self._times + 1, self._jobs + len(claims), number
            self._last_claim, self._noticed_at = max(claims, default=-1), self._clock()
        log.error(
            "Redis has lost data (restarted without an append-only file, flushed, or an old replica was promoted): "
            "its count of this worker's renewals went back from %d to %d; %d jobs were in flight",
            before.highest,
            number - 1,
            len(claims),
        )

    def had_in_flight(self, claim_number: int) -> bool:
        """Whether a job that is in flight was so when the last loss was noticed."""
        return claim_number <= self._last_claim

    def so_far(self) -> DataLoss:
        with self._lock:
            return DataLoss(self._times, self._jobs, self._clock() - self._noticed_at)
