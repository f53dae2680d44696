"""Looks ahead in a queue and claims chosen jobs. Owns what is known of the waiting jobs; inbox thread.

RQ's own dequeue takes the head whatever it is. What an agent's jobs do to its memory must happen in order and one at a
time, without holding up other agents, so claiming passes by jobs of agents that are busy. The list itself is not
touched until a job is claimed: its length stays true for operators. It is read once; after that each look asks only for
what came in at either end.
"""

import time
from typing import Any, Final

from redis import Redis
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue

from stoker_shared.wire import FIELD_AGENT, FIELD_ATTEMPTS, LEASE_KEY
from stoker_worker.every import Every
from stoker_worker.ports import UNUSED, Busy, MemoryUse
from stoker_worker.rq_worker.job_ids import raw, text
from stoker_worker.rq_worker.json_job import memory_use_in
from stoker_worker.rq_worker.lineup import Lineup

# All or nothing for each id: after a crash it is in the queue or in the intermediate list, never nowhere. Before each
# id stands which end it is looked for from: walking 50,000 others takes the server a millisecond.
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

# For each of the jobs KEYS what its producer noted of its use of memory, or its whole data where there is no such note
# of this `created_at`. It stops when those are over ARGV[3] bytes. And which of them are suspects. A key that is no
# hash is one unreadable job, not a failure of the look.
_READ = """
local notes, with_data, suspects, room = {}, {}, {}, tonumber(ARGV[3])
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
  if fields[2] and tonumber(fields[2]) and tonumber(fields[2]) > 0 then suspects[#suspects + 1] = i end
end
return {notes, with_data, suspects}
"""

# ARGV: page, most new ones in front, number of known first ids, those (first one first), known last ids (last one
# first). A known id that is gone was taken by somebody else; the next known one serves as well.
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
_MAX_IN_FRONT: Final = 1000  # more than that, and the queue is read anew
_KNOWN_ENDS: Final = 4
_READ_AT_ONCE: Final = 100
_MAX_DATA_BYTES: Final = 2**17  # compressed, of such a reading: whoever unpacks it is held up
_LEARN_S: Final = 0.002  # time for reading on, in a claim that has found something, or has nothing to find
_LEARN_WHEN_IDLE_S: Final = 0.02  # and in one that has found nothing
_MAX_REMEMBERED: Final = 100_000
_MAX_GONE: Final = 32  # known jobs that are not in the list any more


class Backlog:
    """The waiting jobs of one queue.

    A job that was in flight when a worker died is a suspect. It is claimed by itself only, so that a job which kills
    its workers takes no others down with it a second time.
    """

    def __init__(self, connection: Redis, queue_name: str) -> None:
        self._connection = connection
        self._key = Queue(queue_name, connection=connection).key
        intermediate_key = IntermediateQueue.get_intermediate_queue_key(self._key)
        self._claim_keys = [self._key, intermediate_key, LEASE_KEY.format(queue=queue_name)]
        self._claim = connection.register_script(_CLAIM)
        self._look_at = connection.register_script(_LOOK)
        self._read_at = connection.register_script(_READ)
        self._lineup = Lineup()
        self._learned: dict[str, tuple[MemoryUse, bool]] = {}  # outlives the lineup, which is read anew at times
        self._set_right: dict[str, tuple[MemoryUse, bool]] = {}  # of jobs that go back, until they are seen again
        self._may_start_over = Every(5.0)
        self._starts_over = False
        self._is_whole = True

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """Find out what came in, and for a moment whose it is, until a claim of `limit` jobs finds enough.

        Also when it does, or `limit` is 0, it reads on for a moment: whose turn it is shows only among jobs whose
        agents are known.
        """
        self._look()
        begin = time.perf_counter()
        while self._learn():
            n_chosen = len(self._lineup.choose(limit, busy))
            if time.perf_counter() > begin + _learn_s(limit, n_chosen):
                return

    def claim(self, limit: int, busy: Busy, lease_value: str) -> list[str]:
        """Move up to `limit` job ids to the intermediate list: those that may run beside what is busy, no suspects.

        Nothing is claimed when `lease_value` does not stand in the queue's lease any more.
        """
        return self._take(self._lineup.choose(limit, busy), lease_value)

    @property
    def has_unread(self) -> bool:
        """Whether `read_ahead` stopped before it knew all that waits."""
        return not self._is_whole or bool(self._lineup.unlearned(1))

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect that was read waits to run alone."""
        return self._lineup.suspect() is not None

    def suspect_still_waits(self) -> bool:
        """As `has_suspect`, asked of the server: nobody makes way for one that was canceled meanwhile."""
        while (job_id := self._lineup.suspect()) is not None:
            if self._connection.lpos(self._key, raw(job_id)) is not None:  # type: ignore[arg-type]
                return True
            self._forget(job_id)
        return False

    def claim_suspect(self, lease_value: str) -> list[str]:
        """As `claim`, the oldest suspect only; the caller sees to it that it runs alone."""
        while (job_id := self._lineup.suspect()) is not None:
            if claimed := self._take([job_id], lease_value):
                return claimed
            if self._lineup.suspect() == job_id:  # the lease is lost
                break
        return []

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that the last looks came across."""
        return self._lineup.agents()

    def set_right(self, job_id: str, use: MemoryUse, *, suspect: bool) -> None:
        """A claimed job that goes back is not what was read of it."""
        self._set_right[job_id] = use, suspect

    def _take(self, chosen: list[str], lease_value: str) -> list[str]:
        if not chosen:
            return []
        args: list[str | bytes | int] = [lease_value]
        for job_id in chosen:
            args += [-1 if self._lineup.is_nearer_to_the_end(job_id) else 1, raw(job_id)]
        found = self._claim(keys=self._claim_keys, args=args)
        if found is None:
            return []
        claimed = [text(job_id) for job_id in found]
        for job_id in claimed:
            self._lineup.serve(job_id)
        for job_id in chosen:  # one that was not claimed was taken from the list by somebody else
            self._forget(job_id)
        return claimed

    def _forget(self, job_id: str) -> None:
        self._lineup.discard(job_id)
        self._learned.pop(job_id, None)

    def _look(self) -> None:
        """Take in what came in at either end since the last look, a page at a time."""
        for _ in range(2):
            first, last = self._lineup.first(_KNOWN_ENDS), self._lineup.last(_KNOWN_ENDS)
            sizes = [_PAGE, _MAX_IN_FRONT, len(first)]
            args: list[bytes | int] = [*sizes, *map(raw, first), *map(raw, last)]
            length, goes_on, before, behind = self._look_at(keys=[self._key], args=args)
            if not goes_on:
                self._start_over()
            self._lineup.prepend(self._arriving(before))
            self._lineup.append(self._arriving(behind))
            unknown = length - len(self._lineup)
            self._is_whole = len(behind) < _PAGE
            if self._is_whole and self._starts_over:
                self._starts_over = False
                self._learned = {job_id: use for job_id, use in self._learned.items() if job_id in self._lineup}
            # Somebody removed many, or put some where nobody does: an id that stands there twice looks like that too.
            if not self._is_whole or (unknown >= -_MAX_GONE and not (unknown > 0 and self._may_start_over.is_due())):
                return
            self._start_over()

    def _start_over(self) -> None:
        self._lineup.clear()
        self._starts_over = True

    def _arriving(self, found: list[bytes]) -> list[str]:
        """The ids that came in. One that was here before may be another job by now, of which nothing is known."""
        job_ids = [text(job_id) for job_id in found]
        for job_id in job_ids:
            if not self._starts_over or job_id in self._lineup:
                self._learned.pop(job_id, None)
            if job_id in self._set_right:
                self._learned[job_id] = self._set_right.pop(job_id)
        return job_ids

    def _learn(self) -> bool:
        """Find out whose some of the next jobs are; ``False`` when that is known of all."""
        job_ids = self._lineup.unlearned(_READ_AT_ONCE)
        if not job_ids and not self._is_whole:
            self._look()
            job_ids = self._lineup.unlearned(_READ_AT_ONCE)
        self._read([job_id for job_id in job_ids if job_id not in self._learned])
        for job_id in job_ids:
            if job_id not in self._learned:  # those before it were too large to read more
                break
            use, suspect = self._learned[job_id]
            self._lineup.learn(job_id, use, suspect=suspect)
        return bool(job_ids)

    def _read(self, job_ids: list[str]) -> None:
        if not job_ids:
            return
        if len(self._learned) > _MAX_REMEMBERED:
            self._learned.clear()  # jobs that others took from the list are never forgotten one by one
        keys = [raw(Job.key_for(job_id)) for job_id in job_ids]
        reply: list[list[Any]] = self._read_at(keys=keys, args=[FIELD_AGENT, FIELD_ATTEMPTS, _MAX_DATA_BYTES])
        found, with_data, suspects = reply[0], frozenset(reply[1]), frozenset(reply[2])
        for number, (job_id, value) in enumerate(zip(job_ids, found, strict=False), start=1):
            use = memory_use_in(value) if number in with_data else _noted(value.decode(errors="replace"))
            self._learned[job_id] = use, number in suspects


def _noted(note: str) -> MemoryUse:
    """The end of `FIELD_AGENT`, in one of the forms that `_READ` lets pass."""
    access, _, agent_id = note.partition(" ")
    return MemoryUse("read" if access == "read" else "write", agent_id) if agent_id else UNUSED


def _learn_s(limit: int, n_chosen: int) -> float:
    if 0 < limit == n_chosen:
        return 0.0  # once
    return _LEARN_S if n_chosen or limit == 0 else _LEARN_WHEN_IDLE_S
