"""Claims from all queues of a worker: a quarantined job alone, otherwise as many jobs as there is room. Fetcher thread.

Owns how long a quarantined job has waited, and which ids were enqueued again while their job runs, here or elsewhere:
workers tell their jobs apart by id, so the second delivery of an id cannot start before the first has left. A `Claimer`
chooses within its queue, `JobStart` starts what was claimed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from stoker_worker.periodic import Periodic
from stoker_worker.ports import Busy
from stoker_worker.queue.claimed_job import RqClaimedJob
from stoker_worker.queue.claimer import Claimer, Granted
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.job_start import JobStart, RunsElsewhere
from stoker_worker.queue.members import Members
from stoker_worker.queue.requeue import Claim, Requeue

_QUARANTINED_WAITS_S: Final = 5.0
"""How long other jobs still start while a quarantined job waits. After that nothing is claimed until it has run."""

_LOOK_AGAIN_S: Final = 1.0
"""Until an id is claimed again whose earlier delivery ran at another worker."""

_LOOK_AROUND_S: Final = 0.5
_REST_SHARE: Final = 20.0
"""Rests last so many times as long as a look, which walks past all jobs that are left to other workers."""


class ClaimOrder:
    """Claims the next jobs of all queues, starts them, and enters them into the table of jobs in flight.

    Attributes:
        claimers: of the queues, by name, in the order in which they are served.
        has_claimed: whether there was a claim.
        has_unread: whether the last claim stopped before it knew all waiting jobs.
        knows_all: whether it came to know all of them. Neither is true after one that did not look.
    """

    def __init__(
        self,
        claimers: Mapping[str, Claimer],
        members: Members,
        job_start: JobStart,
        requeue: Requeue,
        in_flight: JobsInFlight[RqClaimedJob],
    ) -> None:
        self.claimers = claimers
        self.has_unread = self.knows_all = False
        self._members = members
        self._job_start = job_start
        self._requeue = requeue
        self._in_flight = in_flight
        self._repeated_ids: set[str] = set()
        self._elsewhere: dict[str, float] = {}
        self._quarantined_since: float | None = None
        self.has_claimed = False
        self._look = Periodic(_LOOK_AROUND_S)

    def waiting_agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that were read; the same object until they change, if one queue has any."""
        waiting = [agents for claimer in self.claimers.values() if (agents := claimer.agents())]
        return waiting[0] if len(waiting) == 1 else frozenset().union(*waiting)

    def prefer(self, is_at_hand: Callable[[str], bool]) -> None:
        """See `QueuePort.prefer`."""
        for claimer in self.claimers.values():
            claimer.waiting.is_at_hand = is_at_hand

    def place_of(self, agent_id: str) -> tuple[int, int]:
        """See `QueuePort.place_of`."""
        places = ((number, claimer.waiting.place_of(agent_id)) for number, claimer in enumerate(self.claimers.values()))
        return next(((number, at) for number, at in places if at is not None), (len(self.claimers), 0))

    def next_agents(self, limit: int) -> tuple[str, ...]:
        """See `QueuePort.next_agents`."""
        if not self.has_claimed:
            for claimer in self.claimers.values():
                claimer.read_ahead(0, Busy())
        running = {job.memory_use.agent_id for job in self._in_flight.snapshot()}
        found = (
            name for claimer in self.claimers.values() for name in claimer.waiting.next_agents(limit + len(running))
        )
        return tuple(islice(dict.fromkeys(name for name in found if name not in running), limit))

    def claim(self, limit: int, busy: Busy, claimed: list[RqClaimedJob]) -> None:
        """Claim and start up to `limit` jobs. Each is added to `claimed` at once, so that a later error loses none."""
        self.has_claimed = True
        for claimer in self.claimers.values():
            claimer.read_ahead(limit, busy)
        if limit > 0 and not self._in_flight and self._claim_quarantined(busy, claimed):
            return
        room = 0 if self._quarantined_comes_first(busy) else limit
        self._repeated_ids.intersection_update(self._in_flight)
        now = time.monotonic()
        self._elsewhere = {job_id: until for job_id, until in self._elsewhere.items() if until > now}
        busy = replace(busy, job_ids=frozenset(self._repeated_ids | self._elsewhere.keys()))
        for name, claimer in self.claimers.items():
            if len(claimed) < room:
                beside = busy.beside(job.memory_use for job in claimed)
                for granted in claimer.claim(room - len(claimed), beside):
                    self._start(name, granted, busy, claimed)
        self.has_unread = any(claimer.has_unread for claimer in self.claimers.values())
        self.knows_all = not self.has_unread

    def look_around(self) -> None:
        """After a claim: see which lines that were left to other workers need not wait for these any more."""
        if not self._look.is_due():
            return
        begin = time.thread_time()
        dead = self._members.dead
        for name, claimer in self.claimers.items():
            others = self._members.of(name).values()
            ready = (one.name for one in others if one.is_ready and not one.is_leaving and one not in dead)
            claimer.look_around(frozenset(ready))
        self._look.rest(_REST_SHARE * (time.thread_time() - begin))

    def _claim_quarantined(self, busy: Busy, claimed: list[RqClaimedJob]) -> bool:
        """While nothing is in flight, the quarantined jobs of all queues come first: they delay nobody then."""
        alone = Busy(memory_is_away=busy.memory_is_away)
        for name, claimer in self.claimers.items():
            if granted := claimer.claim_quarantined(alone):
                self._start(name, granted[0], alone, claimed)
                return True
        return False

    def _quarantined_comes_first(self, busy: Busy) -> bool:
        """Whether a quarantined job has waited for so long that nothing may start before it. Of several workers on a
        queue, one stops for it."""
        alone = Busy(memory_is_away=busy.memory_is_away)
        waits = [name for name, claimer in self.claimers.items() if claimer.next_quarantined(alone) is not None]
        if not waits:
            self._quarantined_since = None
            return False
        if self._quarantined_since is None:
            self._quarantined_since = time.monotonic()
        if time.monotonic() - self._quarantined_since < _QUARANTINED_WAITS_S:
            return False
        return not frozenset(waits).isdisjoint(self._members.duties())

    def _start(self, name: str, granted: Granted, busy: Busy, claimed: list[RqClaimedJob]) -> None:
        job_id = granted.job_id
        if (running := self._in_flight.get(job_id)) is not None:
            self._put_back(name, running)
        elif (job := self._started(name, granted)) is not None:
            is_quarantined = job.attempt > 1
            beside = busy.beside(other.memory_use for other in claimed)
            is_misread = job.memory_use != granted.use
            if is_misread or beside.bars(job.memory_use) or (is_quarantined and self._in_flight):
                # The job has changed since it was read, or its producer's note is wrong. It waits until it may run.
                self.claimers[name].correct(job_id, job.memory_use, quarantined=is_quarantined)
                job.give_back(counts_as_attempt=False)
            else:
                self._in_flight.add(job)
                claimed.append(job)

    def _started(self, name: str, granted: Granted) -> RqClaimedJob | None:
        try:
            return self._job_start.start(name, granted)
        except RunsElsewhere:
            self._requeue(Claim(granted.job_id, name, None), counts_as_attempt=False)
            self._elsewhere[granted.job_id] = time.monotonic() + _LOOK_AGAIN_S
            return None

    def _put_back(self, name: str, running: RqClaimedJob) -> None:
        """The id of a running job was claimed once more. It waits, unless it is the delivery that runs."""
        if running.is_ours():
            self._job_start.drop_id(name, running.job_id)
        else:
            self._requeue(Claim(running.job_id, name, None), counts_as_attempt=False)
            self._repeated_ids.add(running.job_id)
