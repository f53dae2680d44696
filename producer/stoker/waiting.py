"""Waits for the ends of jobs, of one or of many with few commands, and endures lost connections. Does no I/O itself.

A wait consists of short blocking reads: a long one would reach the socket timeout of the caller's connection, and a
cancel, a delete or an expiry writes nothing that could end it.

RQ writes each end into the job's result stream, and one XREAD reads many streams. Only a success entry is certainly the
end, because retries write entries too; after any other entry the job's hash is read. A canceled, deleted or expired job
writes no entry, so each second the states of a few hundred jobs are read.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rq.job import Job
from rq.results import Result

from stoker.connection import LOST, REFUSED
from stoker.job_record import KEPT_RESULTS, NO_ENTRY, JobRecord, is_end
from stoker.operations import Command, Commands, Entries, Operation, Pause, T, ask, stream_entries
from stoker.presence import unready
from stoker_shared.errors import ResultTimeout

GIVE_UP_S = 60.0
"""Seconds without a server after which a wait without a time limit ends."""

_PAUSE_S: Final = 0.2
_FIRST_BLOCK_S: Final = 0.2  # a cancel by another client is noticed that much later


class Patience:
    """The limits of one wait, which begins when this is made: its time limit, and the outages that it endures.

    Args:
        timeout_s: how long to wait, in seconds; ``None`` for no limit.
        was_answered: a server is known to be at this address.
    """

    def __init__(self, timeout_s: float | None, *, was_answered: bool = False) -> None:
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._was_answered = was_answered

    @property
    def left_s(self) -> float:
        """Seconds until the time limit, infinite without one, 0 after it."""
        return float("inf") if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def enduring(self, operation: Operation[T]) -> Operation[T | None]:
        """The operation's result; ``None``, after a pause, if the connection was lost and the patience has not run out.

        Raises:
            redis.exceptions.RedisError: the patience has run out, or the server has never answered in this wait, so its
                address is probably wrong.
        """
        try:
            result = yield from operation
        except REFUSED:
            raise
        except LOST:
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            gives_up_at = self._lost_at + GIVE_UP_S if self._deadline is None else self._deadline
            if not self._was_answered or now >= gives_up_at:
                raise
            yield Pause(min(_PAUSE_S, gives_up_at - now))
            return None
        self._was_answered, self._lost_at = True, None
        return result


def wait_for_end(
    job_id: str, timeout_s: float | None, slice_s: float, *, is_new: bool = False, waited_s: float = 0.0
) -> Operation[JobRecord]:
    """The job, once it has ended or does not exist (any more).

    Args:
        timeout_s: how long to wait, in seconds; ``None`` for no limit, 0 to check once.
        slice_s: longest blocking read, as `blocking_slice_s` of the connection.
        is_new: it was enqueued just now, so the first look already waits a little: a short job costs one round trip.
        waited_s: how long the caller has waited before, in seconds; for the error's message.

    Raises:
        ResultTimeout: it has not ended within `timeout_s`.
        redis.exceptions.RedisError: no server answered at the start, at the end of `timeout_s`, or for `GIVE_UP_S`
            during a wait without a limit.
    """
    patience, last_entry_id = Patience(timeout_s, was_answered=is_new), NO_ENTRY
    block_s = min(slice_s, patience.left_s, _FIRST_BLOCK_S) if is_new else 0.0
    while True:
        record = yield from patience.enduring(_look(job_id, last_entry_id, block_s))
        if record is not None:  # else the connection was lost
            if record.has_ended:
                return record
            if patience.left_s <= 0:
                raise (yield from timed_out(record, waited_s + (timeout_s or 0.0)))
            last_entry_id = record.last_entry_id or last_entry_id
        block_s = min(slice_s, patience.left_s)


def _look(job_id: str, last_entry_id: str, block_s: float) -> Operation[JobRecord]:
    """The job after `block_s` seconds, or as soon as its result stream has an entry after `last_entry_id`."""
    key = Result.get_key(job_id)
    reply, values = yield Commands([results_after({key: last_entry_id}, block_s), JobRecord.hash_command(job_id)])
    return (yield from JobRecord.whole(job_id, values, stream_entries(reply).get(key, [])[::-1]))


def results_after(last_entry_ids: dict[str, str], block_s: float) -> Command:
    """The command that reads the next entries of these result streams, and waits for the first if there is none."""
    block = ("BLOCK", max(1, int(1000 * block_s))) if block_s > 0 else ()  # 0 would block for ever
    return ("XREAD", "COUNT", KEPT_RESULTS, *block, "STREAMS", *last_entry_ids, *last_entry_ids.values())


def timed_out(record: JobRecord, after_s: float) -> Operation[ResultTimeout]:
    """The error of a wait for a job that has not ended, with the reason if no job of its queue can begin."""
    warning = (yield from unready(record.queue)) if record.state == "queued" else None
    still = f"still {record.state} after {after_s:g} s; it is not canceled"
    return ResultTimeout(record.job_id, f"{still}; {warning}" if warning else still)


_FIRST_LOOK: Final = 100  # jobs; many may have ended long ago, and all their results come in one reply
_BLOCKED_ON: Final = 1000  # jobs in one blocking read
_BESIDE: Final = 500  # further jobs, read each time without blocking
_SLICE_BESIDE_S: Final = 0.2
_GATHER_S_PER_JOB: Final = 20e-6  # a short pause, so that ends that come close together are read together
_CHECK_EVERY_S: Final = 1.0
_CHECKED_AT_ONCE: Final = 250


@dataclass
class _Awaited:
    job_id: str
    is_new: bool
    last_entry_id: str = NO_ENTRY


class Waiter:
    """A wait for many jobs: call `wait` in a loop; jobs may be added in between. For one task or thread.

    Each job costs at most one command, or two if it was not enqueued just now, and its part of the XREADs. Beyond that,
    the wait costs a few hundred short commands a second at most, for any number of jobs.
    """

    def __init__(self) -> None:
        self._unseen: dict[str, _Awaited] = {}
        self._waiting: dict[str, _Awaited] = {}
        self._turns: dict[int, Iterator[str]] = defaultdict(lambda: iter(()))
        self._checked_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._unseen) + len(self._waiting)

    def add(self, job_id: str, *, is_new: bool = False) -> None:
        """Wait for this job too. `is_new`, which saves a command: it was enqueued just now, under a generated id."""
        if job_id not in self._waiting:
            self._unseen[job_id] = _Awaited(job_id, is_new)

    def discard(self, job_id: str) -> None:
        self._unseen.pop(job_id, None)
        self._waiting.pop(job_id, None)

    def wait(self, patience: Patience, slice_s: float) -> Operation[list[JobRecord]]:
        """The next jobs to end, one or more, each once; empty if the patience has run out, or there are no jobs.
        `slice_s` is the longest blocking read, as `blocking_slice_s` of the connection.

        Raises:
            redis.exceptions.RedisError: as `Patience.enduring`; nothing is lost, and the next call continues.
        """
        while True:
            ended = yield from patience.enduring(self.look(min(slice_s, patience.left_s)))
            for end in ended or ():
                self.discard(end.job_id)
            if ended or (ended is not None and (not len(self) or (patience.left_s <= 0 and not self._unseen))):
                return ended

    def look(self, block_s: float) -> Operation[list[JobRecord]]:
        """Jobs that had ended already, else the next to end within `block_s` seconds; 0 does not wait."""
        if self._unseen:
            return (yield from self._first_look(list(islice(self._unseen.values(), _FIRST_LOOK))))
        if time.monotonic() - self._checked_at >= _CHECK_EVERY_S:
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

    def _first_look(self, jobs: list[_Awaited]) -> Operation[list[JobRecord]]:
        asked = [job for job in jobs if not job.is_new]
        looks = (JobRecord.hash_command(job.job_id) for job in asked)
        replies = yield Commands([results_after(_last_entry_ids(jobs), 0), *looks])
        found = stream_entries(replies[0])
        values = {job.job_id: reply for job, reply in zip(asked, replies[1:], strict=True)}
        ended = yield from self._sorted_out(jobs, found, values)
        for job in jobs:
            if self._unseen.pop(job.job_id, None):
                self._waiting[job.job_id] = job
        return ended

    def _read(self, jobs: Sequence[_Awaited], block_s: float) -> Operation[list[JobRecord]]:
        if not jobs:
            return []
        found = stream_entries((yield from ask(*results_after(_last_entry_ids(jobs), block_s))))
        new = [job for job in jobs if Result.get_key(job.job_id) in found]
        return (yield from self._sorted_out(new, found, {}))

    def _sorted_out(
        self, jobs: Sequence[_Awaited], found: dict[str, Entries], values: dict[str, list[bytes | None]]
    ) -> Operation[list[JobRecord]]:
        """The `jobs` that have ended. For the others, the wait moves on to their next entries. `values` are hashes that
        were read already; those of other jobs with new entries are read here if necessary."""
        entries = {job.job_id: found.get(Result.get_key(job.job_id), [])[::-1] for job in jobs}
        ended = []
        unread = []
        for job in jobs:
            if entries[job.job_id] and job.job_id not in values:
                record = JobRecord.finished(job.job_id, entries[job.job_id])
                if record is None:
                    unread.append(job.job_id)
                else:
                    ended.append(record)
        values = {**values, **(yield from _hashes(unread))}
        for job in jobs:
            if job.job_id not in values:
                continue
            record = yield from JobRecord.whole(job.job_id, values[job.job_id], entries[job.job_id])
            if record.has_ended:
                ended.append(record)
        for job in jobs:
            if entries[job.job_id]:
                job.last_entry_id = entries[job.job_id][0][0].decode()
        return ended

    def _check(self) -> Operation[list[JobRecord]]:
        """Ends without an entry, among the next few hundred jobs."""
        job_ids = [job.job_id for job in self._next_after(0, _CHECKED_AT_ONCE)]
        self._checked_at = time.monotonic()
        states = yield Commands([("HGET", Job.key_for(job_id), "status") for job_id in job_ids])
        found = zip(job_ids, states, strict=True)
        over = [job_id for job_id, state in found if state is None or is_end(state)]
        jobs = [self._waiting[job_id] for job_id in over if job_id in self._waiting]  # else discarded meanwhile
        if not jobs:
            return []
        entries = stream_entries((yield from ask(*results_after(_last_entry_ids(jobs), 0))))
        without = [job.job_id for job in jobs if Result.get_key(job.job_id) not in entries]
        return (yield from self._sorted_out(jobs, entries, (yield from _hashes(without))))

    def _next_after(self, skipped: int, count: int) -> list[_Awaited]:
        """The next jobs, up to `count`, behind the first `skipped`; begins again after the last."""
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
    replies = (yield Commands([JobRecord.hash_command(job_id) for job_id in job_ids])) if job_ids else []
    return dict(zip(job_ids, replies, strict=True))
