"""Which of the waiting jobs of all queues this worker takes now: suspects alone, else what has room. Inbox thread.

Owns what is known of the waiting jobs of each queue, and how long a suspect has waited. A backlog chooses within its
queue, the starter starts.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from stoker_worker.ports import Busy, ClaimedJob
from stoker_worker.rq_worker.backlog import Backlog
from stoker_worker.rq_worker.behind_runs import BehindRuns
from stoker_worker.rq_worker.lease import Lease
from stoker_worker.rq_worker.starter import JobStarter

_SUSPECT_WAITS_S = 5.0
"""How long work that has room goes on beside a suspect that has to run alone. Then nothing is claimed until it has."""


class Claiming:
    """
    Attributes:
        has_unread: whether the last claim stopped before it knew all that waits.
    """

    def __init__(
        self,
        backlogs: Mapping[str, Backlog],
        lease: Lease,
        starter: JobStarter,
        behind_runs: BehindRuns,
        in_flight: dict[str, ClaimedJob],
        *,
        give_back: Callable[[ClaimedJob], None],
    ) -> None:
        """
        Args:
            backlogs: of the queues, by name, in the order in which they are served.
            in_flight: what this worker runs, by job id; what is started is added.
            give_back: for a job that is not what it was when we looked.
        """
        self.backlogs = backlogs
        self._lease = lease
        self._starter = starter
        self._behind_runs = behind_runs
        self._in_flight = in_flight
        self._give_back = give_back
        self._suspect_since: float | None = None
        self.has_unread = False

    def waiting_agents(self) -> frozenset[str]:
        waiting = [agents for backlog in self.backlogs.values() if (agents := backlog.agents())]
        return waiting[0] if len(waiting) == 1 else frozenset().union(*waiting)

    def claim(self, limit: int, busy: Busy, claimed: list[ClaimedJob]) -> None:
        """Add to `claimed` as each job is started, so that an error on the way loses none."""
        nothing_runs = limit > 0 and not self._in_flight
        if nothing_runs:
            for backlog in self.backlogs.values():
                backlog.read_ahead(limit, busy)
            if self._claim_suspect(claimed):
                return
        room = 0 if self._makes_way() else limit
        for name, backlog in self.backlogs.items():
            if not nothing_runs:
                backlog.read_ahead(room - len(claimed), busy)
            self._claim_from(name, room - len(claimed), busy, claimed)
            if 0 < room == len(claimed):  # with no room at all, each is read ahead
                break
        self.has_unread = any(backlog.has_unread for backlog in self.backlogs.values())

    def _claim_suspect(self, claimed: list[ClaimedJob]) -> bool:
        """With nothing in flight the suspects of all queues come first: no other moment costs less."""
        for name, backlog in self.backlogs.items():
            while job_ids := backlog.claim_suspect(self._lease.held_value(name)):
                self._start(name, job_ids[0], Busy(), claimed)
                if claimed:
                    return True
        return False

    def _makes_way(self) -> bool:
        """Whether a suspect has waited for so long that nothing may start before it."""
        if not any(backlog.has_suspect for backlog in self.backlogs.values()):
            self._suspect_since = None
            return False
        if self._suspect_since is None:
            self._suspect_since = time.monotonic()
        if time.monotonic() - self._suspect_since < _SUSPECT_WAITS_S:
            return False
        return any(backlog.suspect_still_waits() for backlog in self.backlogs.values())

    def _claim_from(self, name: str, room: int, busy: Busy, claimed: list[ClaimedJob]) -> None:
        busy = replace(busy, job_ids=self._behind_runs.job_ids())
        beside = busy.beside(job.memory_use for job in claimed)
        for job_id in self.backlogs[name].claim(room, beside, self._lease.held_value(name)):
            self._start(name, job_id, busy.beside(job.memory_use for job in claimed), claimed)

    def _start(self, name: str, job_id: str, busy: Busy, claimed: list[ClaimedJob]) -> None:
        if (running := self._in_flight.get(job_id)) is not None:
            self._behind_runs.put(name, running)
            return
        job = self._starter.start(name, job_id)
        if job is None:
            return
        if busy.bars(job.memory_use) or (job.attempt > 1 and self._in_flight):
            # Not what it was when we looked, or not what its producer noted: its turn comes when it may run.
            self.backlogs[name].set_right(job_id, job.memory_use, suspect=job.attempt > 1)
            self._give_back(job)
            return
        self._in_flight[job_id] = job
        claimed.append(job)
