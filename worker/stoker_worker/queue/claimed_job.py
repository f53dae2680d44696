"""A claimed job in RQ's terms: how it ends itself. Owns what RQ needs for that; finisher threads.

A job stays in flight until it is released, so recovery leaves it alone while it is being ended; the heartbeat skips it
from then on (`ending`).
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import DEFAULT_RESULT_TTL_S
from stoker_worker.events import log_job
from stoker_worker.ports import ClaimedJob
from stoker_worker.queue.cascade import CheckOutcome, verdict_after, verdict_on
from stoker_worker.queue.client import as_redis_unavailable
from stoker_worker.queue.end import JobFinish
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.json_job import JobRun
from stoker_worker.queue.requeue import Claim

_FOR_EVER_S: Final = 366 * 86_400.0
_MARGIN_S: Final = 3600.0
"""Longer than any lease, and than the clocks of two machines differ."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RqClaimedJob(ClaimedJob):
    """See `ClaimedJob` for the methods.

    Attributes:
        ending: set once somebody ends the job. The heartbeat then leaves its run alone: each beat would undo the
            transaction that is on its way.
        saves: set once this run begins to save its turn.
    """

    run: JobRun = field(repr=False)
    ends: JobFinish = field(repr=False)
    in_flight: "JobsInFlight[RqClaimedJob]" = field(repr=False)
    ending: threading.Event = field(default_factory=threading.Event, repr=False)
    saves: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def lives_s(self) -> float:
        ttl_s = self.run.job.get_result_ttl(DEFAULT_RESULT_TTL_S)
        return _MARGIN_S + (ttl_s if 0 <= ttl_s < _FOR_EVER_S else _FOR_EVER_S)

    @property
    def moved_from(self) -> str | None:
        """This worker's own name is none: it was started anew."""
        return None if super().moved_from == self.ends.ownership.member else super().moved_from

    @as_redis_unavailable()
    def is_ours(self) -> bool:
        return self.ends.ownership.of(self.run) == "ours"

    @as_redis_unavailable()
    def begin_save(self) -> None:
        self.saves.set()
        with self._lost_is_told():
            ownership = self.ends.ownership
            if ownership.of(self.run, saves=True) != "ours" or not ownership.lease.has_a_turn():
                raise OwnershipLost(f"job {self.job_id} is no longer this worker's")

    @as_redis_unavailable()
    def finish(self, result: Mapping[str, Any]) -> bool:
        self.ending.set()
        also = None
        if (verdict := verdict_on(self.run.job, self.request, result)) is not None:
            if self._goes_on(verdict):
                return False
            result, also = {**result, **verdict.as_fields()}, partial(self.ends.cascade.count, verdict=verdict)
        with self._lost_is_told():
            self.ends.finish(self.run, result, also)
        self.ends.streams.close(self.claim_number, ended=True)
        return True

    @as_redis_unavailable()
    def fail(self, error: Exception, partial_text: str | None = None, *, may_retry: bool = True) -> bool:
        self.ending.set()
        verdict = verdict_after(self.run.job, self.request, error)
        if verdict is not None and self._goes_on(verdict):
            return False
        with self._lost_is_told():
            self.ends.fail(self.run, error, partial_text=partial_text, may_retry=may_retry)
        self.ends.streams.close(self.claim_number, ended=True)
        return True

    @as_redis_unavailable()
    def stop(self) -> None:
        self.ending.set()
        if not self.ends.stop(self.run):
            self.ends.ownership.refuse_if_lost(self.run, self.claim_number)
            self._clear_progress()
        self.ends.streams.close(self.claim_number, ended=True)

    @as_redis_unavailable()
    def give_back(self, *, counts_as_attempt: bool, alone: bool = False) -> bool:
        may_be_saved = self.was_saving or self.saves.is_set()  # then the next run tells
        if self.in_flight.is_to_stop(self.job_id) and not may_be_saved:  # nobody else knows of it
            with suppress(OwnershipLost):
                self.stop()
            return False
        self.ending.set()
        try:
            claim = Claim(self.job_id, self.queue, self.run.execution, alone=alone)
            if self.ends.requeue(claim, counts_as_attempt=counts_as_attempt) == "ended":
                self.ends.ownership.let_go(self.run)
                return False
            self._clear_progress()
            return True
        finally:
            self.ends.streams.close(self.claim_number, ended=False)

    @as_redis_unavailable()
    def drop(self) -> None:
        try:
            self.ends.ownership.let_go(self.run)
        finally:
            self.ends.streams.close(self.claim_number, ended=False)

    def release(self) -> None:
        self.in_flight.remove(self)
        self.ends.streams.close(self.claim_number, ended=False)  # last: `withdrawn` opens streams of jobs in flight

    def _goes_on(self, verdict: CheckOutcome) -> bool:
        """Send the job on to the next model, unless there is none, or its stop was asked for."""
        if verdict.next is None or self.in_flight.is_to_stop(self.job_id):
            return False
        self._clear_progress()
        try:
            with self._lost_is_told():
                self.ends.cascade.go_on(self.run, verdict, verdict.next)
        finally:
            self.ends.streams.close(self.claim_number, ended=False)
        condition = (verdict.attempts[-1].reason or "").partition(":")[0]  # the rest may quote the request
        log_job("escalated", self.job_id, agent=self.request.agent_id, reason=condition, to=verdict.next.model)
        return True

    @contextmanager
    def _lost_is_told(self) -> Iterator[None]:
        try:
            yield
        except OwnershipLost:
            self.ends.ownership.refuse_if_lost(self.run, self.claim_number)
            raise

    def _clear_progress(self) -> None:
        if self.run.job.has_progress:
            self.ends.progress.clear(self.run.job.key)
