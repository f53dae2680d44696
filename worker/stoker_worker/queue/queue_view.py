"""The waiting jobs of one queue as they were last seen. Owns what was read of RQ's list, and reads on; fetcher thread.

RQ's own dequeue takes the first job, whatever it is. Claiming by agent needs to know the jobs behind it. Ids stay in
the list until they are claimed, so operators see its true length. It is read once; after that each look asks only for
the ids that came in at either end, and for those that members took.
"""

import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple

from redis import Redis
from rq.job import Job
from rq.queue import Queue

from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.request import Access
from stoker_shared.wire import COUNTS_KEY, FIELD_AGENT, FIELD_ATTEMPTS, REQUEST_KWARG, TAKEN_KEY
from stoker_worker.periodic import Periodic
from stoker_worker.ports import UNUSED, Busy, MemoryUse
from stoker_worker.queue.fair_queue import FairQueue
from stoker_worker.queue.foreign_ids import raw, text

_LOOK: Final = (files(__package__) / "look.lua").read_text(encoding="utf-8")
_READ: Final = (files(__package__) / "read.lua").read_text(encoding="utf-8")
_PAGE: Final = 250
_MAX_IN_FRONT: Final = 1000  # with more new ids than that, the queue is read anew
_KNOWN: Final = (0, 1, 3, 7, 15, 31, 63, 127)  # from either end: other members take most from there
_READ_AT_ONCE: Final = 100
_AT_ONCE_BYTES: Final = 2**17  # compressed, in one reading: unpacking it holds up the thread
_READ_S: Final = 0.002  # for reading on, in a claim that has found jobs or has no room for any
_READ_WHEN_IDLE_S: Final = 0.02  # and in a claim that has room and has found none
_MAX_GONE: Final = 32  # known jobs that are not in the list any more


class _Known(NamedTuple):
    use: MemoryUse
    quarantined: bool


class QueueView:
    """
    Attributes:
        waiting: the jobs, in the order in which they are served.
    """

    def __init__(self, connection: Redis, queue_name: str) -> None:
        counts = COUNTS_KEY.format(queue=queue_name)
        self._look_keys = [Queue(queue_name, connection=connection).key, TAKEN_KEY.format(queue=queue_name), counts]
        self._look_at = connection.register_script(_LOOK)
        self._read_at = connection.register_script(_READ)
        self.waiting = FairQueue()
        self._known: dict[str, _Known] = {}  # of jobs that are expected to come into `waiting`
        self._may_start_over = Periodic(5.0)
        self._is_whole = True
        self._n_taken = 0

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """Look for jobs that came in, and read how they use memory until a claim of `limit` jobs would find enough.

        Fairness can only be judged among jobs that were read, so this reads a little further even when it has found
        enough, or `limit` is 0.
        """
        self._look()
        begin = time.perf_counter()
        while self._learn():
            n_chosen = len(self.waiting.choose(limit, busy))
            read_s = _READ_WHEN_IDLE_S if limit and not n_chosen else _READ_S
            if 0 < limit == n_chosen or time.perf_counter() > begin + read_s:
                return

    @property
    def has_unread(self) -> bool:
        """Whether `read_ahead` stopped before it knew all waiting jobs."""
        return not self._is_whole or bool(self.waiting.unlearned(1))

    def correct(self, job_id: str, use: MemoryUse, *, quarantined: bool) -> None:
        """A claimed job that goes back to the queue differs from what was read of it: note how it really is."""
        self._known[job_id] = _Known(use, quarantined)

    def _look(self) -> None:
        """Take in what came in at either end since the last look, a page at a time, and what was taken."""
        for _ in range(2):
            first, last = self.waiting.first(_KNOWN[-1] + 1), self.waiting.last(_KNOWN[-1] + 1)
            anchors, ends = ([known[at] for at in _KNOWN if at < len(known)] for known in (first, last))
            args: list[bytes | int] = [_PAGE, _MAX_IN_FRONT, self._n_taken, len(anchors)]
            args += [*map(raw, anchors), *map(raw, ends)]
            length, anchor, before, behind, taken, n_taken = self._look_at(keys=self._look_keys, args=args)
            knows_taken = 0 <= n_taken - self._n_taken <= len(taken)
            self._n_taken = n_taken
            for job_id in filter(self.waiting.__contains__, map(text, taken)):
                self.waiting.discard(job_id)
                self._known.pop(job_id, None)  # if it comes back, its worker was lost with it, perhaps
            if not anchor:
                self._start_over()
            if not knows_taken:  # a job may have been taken, and be back because its worker was lost
                self._known.clear()
            # Those that were taken, and are back already, are in front anew.
            known_before = [job_id for job_id in first[: _KNOWN[anchor - 1] if anchor else 0] if job_id in self.waiting]
            self.waiting.prepend(self._arriving(_without_known(before, known_before)))
            self.waiting.append(self._arriving(behind))
            self._is_whole = len(behind) < _PAGE
            if self._is_whole and self._known:
                self._known = {job_id: known for job_id, known in self._known.items() if job_id in self.waiting}
            # Jobs were removed in between, or others put there. An id that is in the list twice looks like that too.
            n_unknown = length - len(self.waiting)
            is_wrong = n_unknown < -_MAX_GONE or (n_unknown > 0 and self._may_start_over.is_due())
            if not (self._is_whole and is_wrong):
                return
            self._start_over()

    def _start_over(self) -> None:
        learned = self.waiting.learned().items()
        self._known |= {job_id: _Known(job.use, job.quarantined) for job_id, job in learned}
        self.waiting.clear()

    def _arriving(self, found: Sequence[bytes]) -> list[str]:
        """The ids that came in. Nothing is known of one that was here already: it may be another job by now."""
        job_ids = [text(job_id) for job_id in found]
        for job_id in job_ids:
            if job_id in self.waiting:
                self._known.pop(job_id, None)
        return job_ids

    def _learn(self) -> bool:
        """Find out how the next jobs use memory; ``False`` when that is known of all."""
        job_ids = self.waiting.unlearned(_READ_AT_ONCE)
        if not job_ids and not self._is_whole:
            self._look()
            job_ids = self.waiting.unlearned(_READ_AT_ONCE)
        self._read([job_id for job_id in job_ids if job_id not in self._known])
        for job_id in job_ids:
            if job_id not in self._known:  # the data of those before it was too large to read more
                break
            known = self._known.pop(job_id)
            self.waiting.learn(job_id, known.use, quarantined=known.quarantined)
        return bool(job_ids)

    def _read(self, job_ids: Sequence[str]) -> None:
        if not job_ids:
            return
        keys = [raw(Job.key_for(job_id)) for job_id in job_ids]
        args: list[str | int] = [FIELD_AGENT, FIELD_ATTEMPTS, _AT_ONCE_BYTES, MAX_DATA_BYTES]
        reply: list[list[Any]] = self._read_at(keys=keys, args=args)
        with_data, quarantined = frozenset(reply[1]), frozenset(reply[2])
        for number, (job_id, value) in enumerate(zip(job_ids, reply[0], strict=False), start=1):
            use = use_in(value) if number in with_data else use_noted(value)
            self._known[job_id] = _Known(use, number in quarantined)


def _without_known(before: Sequence[bytes], known: Sequence[str]) -> list[bytes]:
    """What came in before a known id, without the known ids before that one that are still in front of it."""
    left, older = list(before), iter(reversed(known))
    while left and any(text(left[-1]) == job_id for job_id in older):
        left.pop()
    return left


def use_in(data: bytes | None) -> MemoryUse:
    """Of a job with this stored `data`; `UNUSED` if it cannot be read."""
    try:
        request = read_json(unpacked(data or b""), MAX_DATA_BYTES)[3][REQUEST_KWARG]
        agent_id, cache, action = (request.get(name) for name in ("agent_id", "cache", "action"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return UNUSED
    access: Access = "none" if cache == "off" else "read" if cache == "read" or action == "info" else "write"
    return MemoryUse.of(access, agent_id if isinstance(agent_id, str) else None)


def use_noted(note: bytes) -> MemoryUse:
    """From the end of `FIELD_AGENT`, in one of the forms that `read.lua` lets pass."""
    word, _, agent_id = note.decode(errors="replace").partition(" ")
    access: Access = "read" if word == "read" else "write"
    return MemoryUse(access, agent_id) if agent_id else UNUSED
