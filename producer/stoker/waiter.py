"""Waits for the ends of many jobs with few commands. Owns the set of jobs it waits for; does no I/O itself.

RQ writes each end into the job's result stream, and one XREAD reads many streams. Only the entry of a success is
certain to be the end, because retries write entries too; after any other entry the job's hash is read. A job that is
canceled, deleted or expires writes no entry; every few seconds, an EXISTS and a ZMSCORE for hundreds of jobs find
those.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rq.results import Result

from stoker.job_record import NO_ENTRY, Ended, JobRecord
from stoker.operations import Commands, Entries, Operation, Pause, ask, stream_entries
from stoker.silent_ends import canceled_of, gone_of, parts_of
from stoker.waiting import Patience, results_after

_FIRST_LOOK: Final = 100  # jobs; many may have ended long ago, and all their results come in one reply
_BLOCKED_ON: Final = 1000  # jobs in one blocking read
_BESIDE: Final = 500  # jobs beyond these that are read each time without blocking
_SLICE_BESIDE_S: Final = 0.2
_GATHER_S_PER_JOB: Final = 20e-6  # a short pause, so that ends that come close together are read together
_CHECKED_AT_ONCE: Final = 5000
_MOST_AT_RANDOM: Final = 100
_FEW: Final = 8  # up to so many jobs are checked one by one, and more often
_CHECK_FEW_S: Final = 1.0
_CHECK_EVERY_S: Final = (2.0, 5.0)  # at the beginning of a wait, and after a while


@dataclass
class _Awaited:
    job_id: str
    queue: str | None
    is_new: bool
    last_entry_id: str = NO_ENTRY
    repeats: bool = False


class Waiter:
    """A wait for many jobs: call `wait` in a loop; jobs may be added in between. For one task or thread.

    Each job costs at most one command, or two if it was not enqueued just now, and its part of the XREADs. Beyond that,
    the wait costs a few commands a second for any number of jobs.
    """

    def __init__(self) -> None:
        self._unseen: dict[str, _Awaited] = {}
        self._waiting: dict[str, _Awaited] = {}
        self._turns: dict[int, Iterator[str]] = defaultdict(lambda: iter(()))
        self._check_every_s = _CHECK_EVERY_S[0]
        self._n_at_random = 1
        self._checked_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._unseen) + len(self._waiting)

    def add(self, job_id: str, queue_if_new: str | None = None) -> None:
        """Wait for this job too.

        Args:
            queue_if_new: the queue into which the job was enqueued just now, under a generated id; saves a command.
        """
        if job_id not in self._waiting:
            self._unseen[job_id] = _Awaited(job_id, queue_if_new, queue_if_new is not None)

    def discard(self, job_id: str) -> None:
        """Stop waiting for this job."""
        self._unseen.pop(job_id, None)
        self._waiting.pop(job_id, None)

    def wait(self, patience: Patience, slice_s: float) -> Operation[list[Ended]]:
        """The next jobs to end, one or more, each once; empty if the patience has run out, or there are no jobs.

        Args:
            slice_s: longest blocking read, as `blocking_slice_s` of the connection.

        Raises:
            redis.exceptions.RedisError: as `Patience.enduring`; nothing is lost, and the next call continues.
        """
        while True:
            ended = yield from patience.enduring(self.look(min(slice_s, patience.left_s)))
            for end in ended or ():
                self.discard(end.job_id)
            if ended or (ended is not None and (not len(self) or (patience.left_s <= 0 and not self._unseen))):
                return ended

    def look(self, block_s: float) -> Operation[list[Ended]]:
        """Jobs that had ended already, else the next to end within `block_s` seconds; 0 does not wait."""
        if self._unseen:
            return (yield from self._first_look(list(islice(self._unseen.values(), _FIRST_LOOK))))
        every_s = _CHECK_FEW_S if len(self._waiting) <= _FEW else self._check_every_s
        if time.monotonic() - self._checked_at >= every_s:
            ended = yield from self._check()
            if ended:
                return ended
        jobs = list(islice(self._waiting.values(), _BLOCKED_ON))
        if len(self._waiting) > _BLOCKED_ON:
            block_s = min(block_s, _SLICE_BESIDE_S)
            ended = yield from self._read(self._next_after(_BLOCKED_ON, _BESIDE), 0)
            if ended:
                return ended
        gather_s = min(block_s, len(jobs) * _GATHER_S_PER_JOB)
        if gather_s > 0.001:
            yield Pause(gather_s)
        return (yield from self._read(jobs, block_s - gather_s))

    def _first_look(self, jobs: list[_Awaited]) -> Operation[list[Ended]]:
        asked = [job for job in jobs if not job.is_new]
        looks = ((*JobRecord.hash_command(job.job_id), "repeats_left") for job in asked)
        replies = yield Commands([results_after(_last_entry_ids(jobs), 0), *looks])
        found = stream_entries(replies[0])
        values = {job.job_id: reply[:-1] for job, reply in zip(asked, replies[1:], strict=True)}
        for job, reply in zip(asked, replies[1:], strict=True):
            job.repeats = reply[-1] is not None
        ended = yield from self._sorted_out(jobs, found, values)
        for job in jobs:
            if self._unseen.pop(job.job_id, None):
                self._waiting[job.job_id] = job
        return ended

    def _read(self, jobs: Sequence[_Awaited], block_s: float) -> Operation[list[Ended]]:
        if not jobs:
            return []
        found = stream_entries((yield from ask(*results_after(_last_entry_ids(jobs), block_s))))
        new = [job for job in jobs if Result.get_key(job.job_id) in found]
        return (yield from self._sorted_out(new, found, {}))

    def _sorted_out(
        self, jobs: Sequence[_Awaited], found: dict[str, Entries], values: dict[str, list[bytes | None]]
    ) -> Operation[list[Ended]]:
        """Those of `jobs` that have ended. For the others, the wait moves on to their next entries.

        Args:
            values: hashes that were read already; hashes of other jobs with new entries are read here if necessary.
        """
        entries = {job.job_id: found.get(Result.get_key(job.job_id), [])[::-1] for job in jobs}
        ended = []
        unread = []
        for job in jobs:
            if entries[job.job_id] and job.job_id not in values:
                record = None if job.repeats else JobRecord.finished(job.job_id, job.queue, entries[job.job_id])
                if record is None:
                    unread.append(job.job_id)
                else:
                    ended.append(Ended(job.job_id, record))
        values = {**values, **(yield from _hashes(unread))}
        for job in jobs:
            if job.job_id not in values:
                continue
            record = yield from JobRecord.whole(job.job_id, values[job.job_id], entries[job.job_id])
            if record is None or record.has_ended:
                ended.append(Ended(job.job_id, record))
        gone = {end.job_id for end in ended}
        for job in jobs:
            if job.job_id not in gone and entries[job.job_id]:
                job.last_entry_id = entries[job.job_id][0][0].decode()
            if job.queue is None and job.job_id in values:
                job.queue = (values[job.job_id][1] or b"").decode(errors="replace")
        return ended

    def _check(self) -> Operation[list[Ended]]:
        """Ends without an entry. A random job is always checked, in case its entry was lost, or it was canceled in the
        queue of another model; if that finds an end, more of them the next time."""
        jobs = self._next_after(0, _CHECKED_AT_ONCE)
        at_random: set[str] = set()
        if len(jobs) <= _FEW:
            candidates = [job.job_id for job in jobs]
        else:
            candidates = yield from gone_of([job.job_id for job in jobs])
            by_queue = defaultdict(list)
            for job in jobs:
                by_queue[job.queue].append(job.job_id)
            for queue, job_ids in by_queue.items():
                if queue:
                    candidates += yield from canceled_of(queue, job_ids)
            at_random = {job.job_id for job in random.sample(jobs, min(self._n_at_random, len(jobs)))} - {*candidates}
            candidates += at_random
        ended = []
        for job_id, values in (yield from _hashes(list(dict.fromkeys(candidates)))).items():
            record = yield from JobRecord.whole(job_id, values, [])
            if record is None or record.has_ended:
                ended.append(Ended(job_id, record))
        has_missed_some = any(end.job_id in at_random for end in ended)
        self._n_at_random = min(_MOST_AT_RANDOM, 2 * self._n_at_random) if has_missed_some else 1
        self._checked_at = time.monotonic()
        self._check_every_s = _CHECK_EVERY_S[0] if ended else min(_CHECK_EVERY_S[1], self._check_every_s * 1.2)
        return ended

    def _next_after(self, skipped: int, count: int) -> list[_Awaited]:
        """The next jobs, up to `count`, of those after the first `skipped`; begins again after the last."""
        jobs: list[_Awaited] = []
        for _ in range(2):
            jobs = [self._waiting[job_id] for job_id in islice(self._turns[skipped], count) if job_id in self._waiting]
            if jobs:
                break
            self._turns[skipped] = iter(list(islice(self._waiting, skipped, None)))
        return jobs


def _last_entry_ids(jobs: Sequence[_Awaited]) -> dict[str, str]:
    return {Result.get_key(job.job_id): job.last_entry_id for job in jobs}


def _hashes(job_ids: list[str]) -> Operation[dict[str, list[bytes | None]]]:
    values: dict[str, list[bytes | None]] = {}
    for part in parts_of(job_ids, _FIRST_LOOK):
        replies = yield Commands([JobRecord.hash_command(job_id) for job_id in part])
        values.update(zip(part, replies, strict=True))
    return values
