"""The waiting jobs of one queue in Redis: reads ahead in its list, and claims the jobs that `FairQueue` chooses.

Owns what was read of the list; fetcher thread. RQ's own dequeue takes the first job, whatever it is. Claiming by agent
needs to know the jobs behind it. Ids stay in the list until they are claimed, so operators see its true length. It is
read once; after that each look asks only for the ids that came in at either end.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis import Redis
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue

from stoker_shared.wire import FIELD_AGENT, FIELD_ATTEMPTS, LEASE_KEY
from stoker_worker.periodic import Periodic
from stoker_worker.ports import UNUSED, Busy, MemoryUse
from stoker_worker.queue.fair_queue import FairQueue
from stoker_worker.queue.foreign_ids import raw, text
from stoker_worker.queue.json_job import memory_use_in

# An id is moved as a whole: after a crash it is always in the queue or in the intermediate list. Each id comes
# with the end from which it is looked for: walking past 50,000 others takes the server a millisecond.
_CLAIM = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return false end
local claimed = {}
for i = 2, #ARGV, 2 do
  if redis.call('LREM', KEYS[1], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i + 1])
    claimed[#claimed + 1] = ARGV[i + 1]
  end
end
return claimed
"""

# KEYS: jobs. For each of them its producer's note of how it uses memory, or its whole data where there is no such note
# of this `created_at`; no more jobs once that data is over ARGV[3] bytes. And which of them are quarantined. A key that
# is no hash is one unreadable job, not a failure of the script.
_READ = """
local notes, with_data, quarantined, room = {}, {}, {}, tonumber(ARGV[3])
for i, job in ipairs(KEYS) do
  local fields = redis.pcall('HMGET', job, ARGV[1], ARGV[2], 'created_at')
  if fields.err then fields = {false, false, false} end
  local note, of_this_job = fields[1], (fields[3] or '') .. ' '
  if note and string.sub(note, 1, #of_this_job) == of_this_job then
    note = string.sub(note, #of_this_job + 1)
  else
    note = ''
  end
  if note ~= 'none' and not string.find(note, '^write .') and not string.find(note, '^read .') then
    note = redis.pcall('HGET', job, 'data')
    if type(note) ~= 'string' then note = '' end
    if #note > room and i > 1 then break end
    room = room - #note
    with_data[#with_data + 1] = i
  end
  notes[i] = note
  if fields[2] and tonumber(fields[2]) and tonumber(fields[2]) > 0 then quarantined[#quarantined + 1] = i end
end
return {notes, with_data, quarantined}
"""

# ARGV: page, most new ids at the front, number of known first ids, those (the first one first), known last ids (the
# last one first). Somebody else may have taken a known id away; the next known one serves as well.
_LOOK = """
local queue, page, firsts = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[3])
local function find(from, to, rank)
  for i = from, to do
    local at = redis.call('LPOS', queue, ARGV[i], 'RANK', rank)
    if at then return at end
  end
  return -1
end
local length = redis.call('LLEN', queue)
local front, back = find(4, 3 + firsts, 1), find(4 + firsts, #ARGV, -1)
if front < 0 or back < 0 or front > tonumber(ARGV[2]) then
  return {length, 0, {}, redis.call('LRANGE', queue, 0, page - 1)}
end
local before = front > 0 and redis.call('LRANGE', queue, 0, front - 1) or {}
return {length, 1, before, redis.call('LRANGE', queue, back + 1, back + page)}
"""

_PAGE: Final = 250
_MAX_IN_FRONT: Final = 1000  # with more new ids than that, the queue is read anew
_KNOWN_ENDS: Final = 4
_READ_AT_ONCE: Final = 100
_MAX_DATA_BYTES: Final = 2**17  # compressed, in one reading: unpacking it holds up the thread
_READ_S: Final = 0.002  # for reading on, in a claim that has found jobs or has no room for any
_READ_WHEN_IDLE_S: Final = 0.02  # and in a claim that has room and has found none
_MAX_GONE: Final = 32  # known jobs that are not in the list any more


class Claimer:
    """The waiting jobs of one queue.

    A job that was in flight when its worker was lost is quarantined. It is claimed alone, so that a job which kills its
    workers takes no other jobs down with it a second time.
    """

    def __init__(self, connection: Redis, queue_name: str) -> None:
        self._connection = connection
        self._key = Queue(queue_name, connection=connection).key
        intermediate_key = IntermediateQueue.get_intermediate_queue_key(self._key)
        self._claim_keys = [self._key, intermediate_key, LEASE_KEY.format(queue=queue_name)]
        self._claim = connection.register_script(_CLAIM)
        self._look_at = connection.register_script(_LOOK)
        self._read_at = connection.register_script(_READ)
        self._waiting = FairQueue()
        self._known: dict[str, tuple[MemoryUse, bool]] = {}  # of jobs that are expected to come (back) into `_waiting`
        self._may_start_over = Periodic(5.0)
        self._is_whole = True

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """Look for jobs that came in, and read how they use memory until a claim of `limit` jobs would find enough.

        Fairness can only be judged among jobs that were read, so this reads a little further even when it has found
        enough, or `limit` is 0.
        """
        self._look()
        begin = time.perf_counter()
        while self._learn():
            n_chosen = len(self._waiting.choose(limit, busy))
            read_s = _READ_WHEN_IDLE_S if limit and not n_chosen else _READ_S
            if 0 < limit == n_chosen or time.perf_counter() > begin + read_s:
                return

    @property
    def has_unread(self) -> bool:
        """Whether `read_ahead` stopped before it knew all waiting jobs."""
        return not self._is_whole or bool(self._waiting.unlearned(1))

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that were read; the same object until they change."""
        return self._waiting.agents()

    def prefer(self, is_at_hand: Callable[[str], bool]) -> None:
        """Jobs of such agents may pass others."""
        self._waiting.is_at_hand = is_at_hand

    def place_of(self, agent_id: str) -> int | None:
        """As `FairQueue.place_of`."""
        return self._waiting.place_of(agent_id)

    def next_agents(self, limit: int) -> list[str]:
        """As `FairQueue.next_agents`."""
        return self._waiting.next_agents(limit)

    def claim(self, limit: int, busy: Busy, lease_value: str) -> list[str]:
        """Move up to `limit` job ids to the intermediate list: jobs that may run beside what is busy, none quarantined.

        Nothing is claimed if the queue's lease has another value than `lease_value`.
        """
        return self._take(self._waiting.choose(limit, busy), lease_value)

    def claim_quarantined(self, lease_value: str) -> list[str]:
        """As `claim`, for the oldest quarantined job. The caller sees to it that the job runs alone."""
        job_id = self.next_quarantined()
        return [] if job_id is None else self._take([job_id], lease_value)

    def next_quarantined(self) -> str | None:
        """The oldest quarantined job that can be claimed, of those the server still has in the queue."""
        while (job_id := self._waiting.next_quarantined()) is not None:
            if self._connection.lpos(self._key, raw(job_id)) is not None:  # type: ignore[arg-type]
                return job_id
            self._waiting.discard(job_id)
        return None

    def correct(self, job_id: str, use: MemoryUse, *, quarantined: bool) -> None:
        """A claimed job that goes back to the queue differs from what was read of it: note how it really is."""
        self._known[job_id] = use, quarantined

    def _take(self, chosen: Sequence[str], lease_value: str) -> list[str]:
        if not chosen:
            return []
        args: list[str | bytes | int] = [lease_value]
        for job_id in chosen:
            args += [-1 if self._waiting.is_nearer_to_the_end(job_id) else 1, raw(job_id)]
        found = self._claim(keys=self._claim_keys, args=args)
        if found is None:
            return []
        claimed = [text(job_id) for job_id in found]
        for job_id in claimed:
            self._waiting.serve(job_id)
        for job_id in chosen:  # somebody else took the others from the list
            self._waiting.discard(job_id)
        return claimed

    def _look(self) -> None:
        """Take in what came in at either end since the last look, a page at a time."""
        for _ in range(2):
            first, last = self._waiting.first(_KNOWN_ENDS), self._waiting.last(_KNOWN_ENDS)
            args: list[bytes | int] = [_PAGE, _MAX_IN_FRONT, len(first), *map(raw, first), *map(raw, last)]
            length, goes_on, before, behind = self._look_at(keys=[self._key], args=args)
            if not goes_on:
                self._start_over()
            self._waiting.prepend(self._arriving(before))
            self._waiting.append(self._arriving(behind))
            self._is_whole = len(behind) < _PAGE
            if self._is_whole and self._known:
                self._known = {job_id: known for job_id, known in self._known.items() if job_id in self._waiting}
            # Jobs were removed in between, or others put there. An id that is in the list twice looks like that too.
            n_unknown = length - len(self._waiting)
            is_wrong = n_unknown < -_MAX_GONE or (n_unknown > 0 and self._may_start_over.is_due())
            if not (self._is_whole and is_wrong):
                return
            self._start_over()

    def _start_over(self) -> None:
        self._known |= self._waiting.learned()
        self._waiting.clear()

    def _arriving(self, found: list[bytes]) -> list[str]:
        """The ids that came in. Nothing is known of one that was here already: it may be another job by now."""
        job_ids = [text(job_id) for job_id in found]
        for job_id in job_ids:
            if job_id in self._waiting:
                self._known.pop(job_id, None)
        return job_ids

    def _learn(self) -> bool:
        """Find out how the next jobs use memory; ``False`` when that is known of all."""
        job_ids = self._waiting.unlearned(_READ_AT_ONCE)
        if not job_ids and not self._is_whole:
            self._look()
            job_ids = self._waiting.unlearned(_READ_AT_ONCE)
        self._read([job_id for job_id in job_ids if job_id not in self._known])
        for job_id in job_ids:
            if job_id not in self._known:  # the data of those before it was too large to read more
                break
            use, quarantined = self._known.pop(job_id)
            self._waiting.learn(job_id, use, quarantined=quarantined)
        return bool(job_ids)

    def _read(self, job_ids: Sequence[str]) -> None:
        if not job_ids:
            return
        keys = [raw(Job.key_for(job_id)) for job_id in job_ids]
        reply: list[list[Any]] = self._read_at(keys=keys, args=[FIELD_AGENT, FIELD_ATTEMPTS, _MAX_DATA_BYTES])
        found, with_data, quarantined = reply[0], frozenset(reply[1]), frozenset(reply[2])
        for number, (job_id, value) in enumerate(zip(job_ids, found, strict=False), start=1):
            use = memory_use_in(value) if number in with_data else _noted(value.decode(errors="replace"))
            self._known[job_id] = use, number in quarantined


def _noted(note: str) -> MemoryUse:
    """The end of `FIELD_AGENT`, in one of the forms that `_READ` lets pass."""
    access, _, agent_id = note.partition(" ")
    return MemoryUse("read" if access == "read" else "write", agent_id) if agent_id else UNUSED
