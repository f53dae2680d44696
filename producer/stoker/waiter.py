"""Waits for the ends of many jobs with few commands: not one for each job and look. Owns which jobs it waits for.

RQ writes each end into the job's result stream, and one XREAD reads many streams. Only that of a success is the end for
sure (retries write entries too): after any other the job's hash is read. A job that is canceled, deleted or expires
writes nothing; every few seconds one EXISTS and one ZMSCORE for hundreds of jobs find those.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rq.results import Result

from stoker.job_record import KEPT_RESULTS, NO_ENTRY, JobRecord
from stoker.operations import Command, Commands, Entries, Operation, Pause, ask, stream_entries
from stoker.silent_ends import canceled_of, gone_of, parts_of
from stoker_shared.errors import JobNotFound
from stoker_shared.result import GenerationResult

_FIRST_LOOK: Final = 100  # jobs; many of them may have ended long ago, and their results come in one reply
_BLOCKED_ON: Final = 1000
_BESIDE: Final = 500  # of more jobs than that, so many more are looked at each time
_SLICE_BESIDE_S: Final = 0.2
_GATHER_S_PER_JOB: Final = 20e-6  # ends that come close together are read together
_CHECKED_AT_ONCE: Final = 5000
_FEW: Final = 8  # of so few jobs each is looked at by itself, and sooner
_CHECK_FEW_S: Final = 1.0
_CHECK_EVERY_S: Final = (2.0, 5.0)  # at first, and when it has gone on for a while


@dataclass
class _Awaited:
    job_id: str
    queue: str | None
    is_new: bool
    last_entry_id: str = NO_ENTRY
    repeats: bool = False


@dataclass(frozen=True)
class Ended:
    """A job's end; `record` is ``None`` when there is no such job (any more)."""

    job_id: str
    record: JobRecord | None

    def outcome(self) -> GenerationResult:
        """As `JobRecord.outcome`.

        Raises:
            JobNotFound: also when there is no such job.
            JobFailed, JobCanceled: as there.
        """
        if self.record is None:
            raise JobNotFound(self.job_id)
        return self.record.outcome()


class Waiter:
    """The jobs somebody waits for. `look` in a loop; jobs may be added in between. For one task or thread.

    Each job costs one command of its own at most, or two if it was not enqueued just now, and its part of the XREADs.
    All together cost some commands a second, however many they are.
    """

    def __init__(self) -> None:
        self._unseen: dict[str, _Awaited] = {}
        self._waiting: dict[str, _Awaited] = {}
        self._turn_beside: Iterator[str] = iter(())
        self._turn_checked: Iterator[str] = iter(())
        self._check_every_s = _CHECK_EVERY_S[0]
        self._checked_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._unseen) + len(self._waiting)

    @property
    def has_unseen(self) -> bool:
        """Whether there are jobs that no `look` has asked for yet."""
        return bool(self._unseen)

    def add(self, job_id: str, queue_if_new: str | None = None) -> None:
        """Wait for this job too.

        Args:
            queue_if_new: where the job was enqueued just now, under an id made up for it; it saves a command.
        """
        if job_id not in self._waiting:
            self._unseen[job_id] = _Awaited(job_id, queue_if_new, queue_if_new is not None)

    def discard(self, job_id: str) -> None:
        """Wait for it no more."""
        self._unseen.pop(job_id, None)
        self._waiting.pop(job_id, None)

    def look(self, block_s: float) -> Operation[list[Ended]]:
        """Jobs that have ended, each once: those that are found, else the next to end within `block_s`; often none.

        Args:
            block_s: at most the connection's `blocking_slice_s`; 0 asks without waiting.

        Raises:
            redis.exceptions.RedisError: nothing was lost by it, and the next call goes on.
        """
        if self._unseen:
            return (yield from self._first_look(list(islice(self._unseen.values(), _FIRST_LOOK))))
        every_s = _CHECK_FEW_S if len(self._waiting) <= _FEW else self._check_every_s
        if time.monotonic() - self._checked_at >= every_s:
            ended = yield from self._check()
            if ended:
                return ended
        jobs = list(islice(self._waiting.values(), _BLOCKED_ON))
        beside = self._next_beside()
        if beside:
            block_s = min(block_s, _SLICE_BESIDE_S)
            ended = yield from self._read(beside, 0)
            if ended:
                return ended
        gather_s = min(block_s, len(jobs) * _GATHER_S_PER_JOB)
        if gather_s > 0.001:
            yield Pause(gather_s)
        return (yield from self._read(jobs, block_s - gather_s))

    def _first_look(self, jobs: list[_Awaited]) -> Operation[list[Ended]]:
        asked = [job for job in jobs if not job.is_new]
        looks = ((*JobRecord.hash_command(job.job_id), "repeats_left") for job in asked)
        replies = yield Commands([_xread(jobs, 0), *looks])
        found = stream_entries(replies[0])
        values = {job.job_id: reply[:-1] for job, reply in zip(asked, replies[1:], strict=True)}
        for job, reply in zip(asked, replies[1:], strict=True):
            job.repeats = reply[-1] is not None
        ended = yield from self._sorted_out(jobs, found, values)
        for job in jobs:
            if self._unseen.pop(job.job_id, None):
                self._waiting[job.job_id] = job
        self._forget(ended)
        return ended

    def _read(self, jobs: Sequence[_Awaited], block_s: float) -> Operation[list[Ended]]:
        if not jobs:
            return []
        found = stream_entries((yield from ask(*_xread(jobs, block_s))))
        new = [job for job in jobs if Result.get_key(job.job_id) in found]
        ended = yield from self._sorted_out(new, found, {})
        self._forget(ended)
        return ended

    def _sorted_out(
        self, jobs: Sequence[_Awaited], found: dict[str, Entries], values: dict[str, list[bytes | None]]
    ) -> Operation[list[Ended]]:
        """Those of `jobs` that have ended. The others' next entries are waited for.

        Args:
            values: hashes that were read already; those of other jobs with new entries are read here if need be.
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
            record = JobRecord.from_replies(job.job_id, values[job.job_id], entries[job.job_id])
            if record is not None and record.has_ended and not record.is_whole:  # its entry came before, or just now
                record = yield from JobRecord.read(job.job_id)
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
        """Ends that write no entry. One of many jobs is looked at by itself, should its entry have gone astray."""
        jobs = self._next_checked()
        if len(jobs) <= _FEW:
            suspects = [job.job_id for job in jobs]
        else:
            suspects = [random.choice(jobs).job_id]
            suspects += yield from gone_of([job.job_id for job in jobs])
            by_queue = defaultdict(list)
            for job in jobs:
                by_queue[job.queue].append(job.job_id)
            for queue, job_ids in by_queue.items():
                if queue:
                    suspects += yield from canceled_of(queue, job_ids)
        ended = []
        for job_id, values in (yield from _hashes(list(dict.fromkeys(suspects)))).items():
            record = JobRecord.from_replies(job_id, values, [])
            if record is not None and record.has_ended:
                record = yield from JobRecord.read(job_id)
            if record is None or record.has_ended:
                ended.append(Ended(job_id, record))
        self._forget(ended)
        self._checked_at = time.monotonic()
        self._check_every_s = _CHECK_EVERY_S[0] if ended else min(_CHECK_EVERY_S[1], self._check_every_s * 1.2)
        return ended

    def _next_checked(self) -> list[_Awaited]:
        taken = self._taken(self._turn_checked, _CHECKED_AT_ONCE)
        if len(taken) < _CHECKED_AT_ONCE:  # round again
            self._turn_checked = iter(list(self._waiting))
            taken = taken or self._taken(self._turn_checked, _CHECKED_AT_ONCE)
        return taken

    def _next_beside(self) -> list[_Awaited]:
        if len(self._waiting) <= _BLOCKED_ON:
            return []
        taken = self._taken(self._turn_beside, _BESIDE)
        if not taken:
            self._turn_beside = iter(list(islice(self._waiting, _BLOCKED_ON, None)))
            taken = self._taken(self._turn_beside, _BESIDE)
        return taken

    def _taken(self, turn: Iterator[str], count: int) -> list[_Awaited]:
        return [self._waiting[job_id] for job_id in islice(turn, count) if job_id in self._waiting]

    def _forget(self, ended: list[Ended]) -> None:
        for end in ended:
            self.discard(end.job_id)


def _xread(jobs: Sequence[_Awaited], block_s: float) -> Command:
    block = ("BLOCK", max(1, int(1000 * block_s))) if block_s > 0 else ()  # a block of 0 would be for ever
    keys = [Result.get_key(job.job_id) for job in jobs]
    return ("XREAD", "COUNT", KEPT_RESULTS, *block, "STREAMS", *keys, *(job.last_entry_id for job in jobs))


def _hashes(job_ids: list[str]) -> Operation[dict[str, list[bytes | None]]]:
    values: dict[str, list[bytes | None]] = {}
    for part in parts_of(job_ids, _FIRST_LOOK):
        replies = yield Commands([JobRecord.hash_command(job_id) for job_id in part])
        values.update(zip(part, replies, strict=True))
    return values
