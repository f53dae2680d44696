"""Claims from one queue the jobs that `FairQueue` chooses, as far as their agents are free. Fetcher thread.

Owns for how long jobs have been left to the workers that have their agents' caches. What waits in the queue is known to
`QueueView`.
"""

import time
from collections.abc import Callable, Container, Sequence
from importlib.resources import files
from math import inf
from typing import Final, NamedTuple

from redis import Redis
from rq.queue import Queue
from rq.suspension import WORKERS_SUSPENDED

from stoker_shared.wire import CLAIMED_KEY, COUNTS_KEY, MEMBERS_KEY, TAKEN_KEY
from stoker_worker.placement.placement import FRAGMENT, Placement, as_field
from stoker_worker.ports import Busy, LastVersion, MemoryUse
from stoker_worker.queue.fair_queue import Aside
from stoker_worker.queue.foreign_ids import raw
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.queue_view import QueueView
from stoker_worker.queue.registration import member_of

_CLAIM: Final = FRAGMENT + (files(__package__) / "claim.lua").read_text(encoding="utf-8")
_TRIES: Final = 8  # in one claim, while jobs turn out not to be ours to claim
_TRIED_AT_ONCE: Final = 32  # from the second try on: many may be left to the same worker
_MOST_PASSED: Final = 10_000
_HELD_S: Final = 0.5
"""How long a line is aside while a job of its agent is in flight elsewhere, before the next try."""


class Granted(NamedTuple):
    """A job that was claimed.

    Attributes:
        use: how it uses memory, as far as was known when it was claimed.
        last: as in `ClaimedJob`.
    """

    job_id: str
    use: MemoryUse
    last: LastVersion | None = None


class Claimer:
    """The waiting jobs of one queue.

    A job that was in flight when its worker was lost is quarantined. It is claimed alone, so that a job which kills its
    workers takes no other jobs down with it a second time.
    """

    def __init__(
        self,
        connection: Redis,
        queue_name: str,
        lease: Lease,
        placement: Placement,
        *,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            patience_s: how long a job is left to the worker that has its agent's cache, once it was passed here.
        """
        self._connection = connection
        self._lease = lease
        self._placement = placement
        self._patience_s = patience_s
        self._clock = clock
        self._queue_name = queue_name
        self._key = Queue(queue_name, connection=connection).key
        claimed = CLAIMED_KEY.format(queue=queue_name, member=lease.member)
        news = [TAKEN_KEY.format(queue=queue_name), COUNTS_KEY.format(queue=queue_name)]
        agents = [*placement.held.values(), *placement.last.values()]
        self._claim_keys = [self._key, claimed, lease.keys[0], MEMBERS_KEY, *news, WORKERS_SUSPENDED, *agents]
        self._claim = connection.register_script(_CLAIM)
        self._view = QueueView(connection, queue_name)
        self.waiting = self._view.waiting
        self._passed_at: dict[str, float] = {}
        self._idle_at = -inf  # when a claim left a place free
        self._has_untried = False

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """As `QueueView.read_ahead`."""
        self._has_untried = False
        self._view.read_ahead(limit, busy)

    @property
    def has_unread(self) -> bool:
        """As `QueueView.has_unread`; also if the last claim found only jobs so far that are not ours to claim."""
        return self._view.has_unread or self._has_untried

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that were read and may be claimed here; the same object until they change."""
        return self.waiting.lines.agents()

    def claim(self, limit: int, busy: Busy) -> list[Granted]:
        """Take up to `limit` jobs out of the queue, which may run beside what is busy, none of them quarantined.

        Nothing is claimed if the lease has another holder, or an operator has suspended the workers.
        """
        granted: list[Granted] = []
        for n in range(_TRIES):
            left = limit - len(granted)
            chosen = self.waiting.choose(max(left, _TRIED_AT_ONCE) if n and left else left, busy)
            found, has_put_aside = self._take(chosen, left)
            granted += found
            if not has_put_aside:
                break
            busy = busy.beside(one.use for one in found)
        else:
            self._has_untried = True
        if len(granted) < limit:
            self._idle_at = self._clock()
        return granted

    def claim_quarantined(self, busy: Busy) -> list[Granted]:
        """As `claim`, for the oldest quarantined job. The caller sees to it that the job runs alone."""
        job_id = self.next_quarantined(busy)
        return [] if job_id is None else self._take([job_id], 1)[0]

    def next_quarantined(self, busy: Busy) -> str | None:
        """The oldest quarantined job that can be claimed, of those the server still has in the queue."""
        while (job_id := self.waiting.next_quarantined(busy)) is not None:
            if self._connection.lpos(self._key, raw(job_id)) is not None:  # type: ignore[arg-type]
                return job_id
            self.waiting.discard(job_id)
        return None

    def correct(self, job_id: str, use: MemoryUse, *, quarantined: bool) -> None:
        """As `QueueView.correct`."""
        self._view.correct(job_id, use, quarantined=quarantined)

    def look_around(self, ready: Container[str]) -> None:
        """Take back the lines that need not wait any more.

        Args:
            ready: the other members to which lines may be left.
        """
        lines, now, back = self.waiting.lines, self._clock(), []
        if len(self._passed_at) > _MOST_PASSED + len(self.waiting):  # a job that goes back has waited already
            self._passed_at = {job_id: at for job_id, at in self._passed_at.items() if job_id in self.waiting}
        for agent_id, why in lines.aside.items():
            head = lines.first_of(agent_id)
            if now >= why.until or (why.maker and why.maker not in ready):
                back.append(agent_id)
            elif why.maker and head is not None and head.job_id != why.job_id:  # the maker has taken that one
                lines.aside[agent_id] = self._passed(head.job_id, why.maker)
        lines.take_back(back)

    def _passed(self, job_id: str, maker: str) -> Aside:
        """Its patience begins when the job could have been claimed here first."""
        return Aside(job_id, maker, self._passed_at.setdefault(job_id, self._clock()) + self._patience_s)

    def _is_impatient(self, job_id: str) -> bool:
        """A backlog uses up nobody's patience: it begins anew if this worker has had other work all the time."""
        passed_at = self._passed_at.get(job_id, inf)
        is_over = self._clock() - passed_at >= self._patience_s or not self._patience_s
        if is_over and self._patience_s and self._idle_at < passed_at:
            del self._passed_at[job_id]
            return False
        return is_over

    def _take(self, chosen: Sequence[str], limit: int) -> tuple[list[Granted], bool]:
        """Claim the first `limit` of these that are ours to claim; and whether any was put aside."""
        if not chosen:
            return [], False
        args: list[str | bytes | int] = [self._lease.value, self._lease.member, self._placement.worker_name]
        args += [self._queue_name, limit]
        uses = [self.waiting.use_of(job_id) for job_id in chosen]
        for job_id, use in zip(chosen, uses, strict=True):
            word = b""
            if use.agent_id is not None:
                mode = b"w" if use.access == "write" else b"r"
                word = mode + (b"1" if self._is_impatient(job_id) else b"0") + as_field(use.agent_id)
            args += [-1 if self.waiting.is_nearer_to_the_end(job_id) else 1, raw(job_id), word]
        found = self._claim(keys=self._claim_keys, args=args)
        if found is None:
            return [], False
        words = iter([word.decode(errors="replace") for word in found])
        granted, has_put_aside = [], False
        for job_id, use, (verdict, maker, number) in zip(
            chosen, uses, zip(words, words, words, strict=True), strict=False
        ):
            if verdict == "claimed":
                self.waiting.serve(job_id)
                granted.append(Granted(job_id, use, self._last(use, maker, int(number))))
            elif verdict == "gone":  # somebody else took it from the list
                self.waiting.discard(job_id)
            elif verdict in ("held", "passed") and use.agent_id is not None:
                tries_soon = Aside(job_id, "", self._clock() + _HELD_S)
                self.waiting.lines.put_aside(
                    use.agent_id, self._passed(job_id, member_of(maker)) if verdict == "passed" else tries_soon
                )
                has_put_aside = True
        return granted, has_put_aside

    def _last(self, use: MemoryUse, maker: str, number: int) -> LastVersion | None:
        """A job that only reads holds off nobody, so its worker cannot be certain that it knows the newest version."""
        if not maker:
            return None
        is_here = maker == self._placement.worker_name and use.access == "write"
        return LastVersion(number, member_of(maker), is_here)
