"""Looks ahead in a queue and claims chosen jobs. Owns what is known of the waiting jobs; inbox thread.

RQ's own dequeue takes the head whatever it is. An agent's jobs must run one at a time and in order, without holding up
other agents, so claiming passes by jobs of agents that are busy. The list itself is not touched until a job is claimed:
its length stays true for operators. It is read once; after that each look asks only for what came in at either end.
"""

import time
from typing import Final, cast

from redis import Redis
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue

from stoker_shared.wire import FIELD_ATTEMPTS, LEASE_KEY
from stoker_worker.every import Every
from stoker_worker.rq_worker.job_ids import raw, text
from stoker_worker.rq_worker.json_job import agent_in, as_count
from stoker_worker.rq_worker.lineup import Lineup

# All or nothing for each id: after a crash it is in the queue or in the intermediate list, never nowhere.
_CLAIM = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return false end
local claimed = {}
for i = 2, #ARGV do
  if redis.call('LREM', KEYS[1], 1, ARGV[i]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i])
    claimed[#claimed + 1] = ARGV[i]
  end
end
return claimed
"""

# ARGV: page, number of known first ids, those (first one first), known last ids (last one first). A known id that is
# gone was taken by somebody else; the next known one serves as well.
_LOOK = """
local queue, page, firsts = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local function find(from, to, rank)
  for i = from, to do
    local at = redis.call('LPOS', queue, ARGV[i], 'RANK', rank)
    if at then return at end
  end
  return -1
end
local length = redis.call('LLEN', queue)
local front, back = find(3, 2 + firsts, 1), find(3 + firsts, #ARGV, -1)
if front < 0 or back < 0 or front > page then
  return {length, 0, {}, redis.call('LRANGE', queue, 0, page - 1)}
end
local before = front > 0 and redis.call('LRANGE', queue, 0, front - 1) or {}
return {length, 1, before, redis.call('LRANGE', queue, back + 1, back + page)}
"""

_PAGE: Final = 1000
_KNOWN_ENDS: Final = 4
_READ_AT_ONCE: Final = 20  # payloads; each may be megabytes
_LEARN_WHEN_DONE_S: Final = 0.0005  # time for reading on, in a claim that has found enough: once, mostly
_LEARN_S: Final = 0.002  # in one that has found something, or has nothing to find
_LEARN_WHEN_IDLE_S: Final = 0.02  # and in one that has found nothing
_MAX_REMEMBERED: Final = 100_000
_MAX_GONE: Final = 32  # known jobs that are not in the list any more


class Backlog:
    """The waiting jobs of one queue.

    A job that was in flight when a worker died is a suspect: it runs alone, so that a job which kills its workers takes
    no others down with it a second time.
    """

    def __init__(self, connection: Redis, queue_name: str) -> None:
        self._connection = connection
        self._key = Queue(queue_name, connection=connection).key
        intermediate_key = IntermediateQueue.get_intermediate_queue_key(self._key)
        self._claim_keys = [self._key, intermediate_key, LEASE_KEY.format(queue=queue_name)]
        self._claim = connection.register_script(_CLAIM)
        self._look_at = connection.register_script(_LOOK)
        self._lineup = Lineup()
        self._learned: dict[str, tuple[str | None, bool]] = {}  # outlives the lineup, which is read anew at times
        self._may_start_over = Every(5.0)
        self.waits_for_quiet = False

    def claim(self, limit: int, busy_agents: frozenset[str], lease_value: str, *, nothing_runs: bool) -> list[str]:
        """Move up to `limit` job ids to the intermediate list: the oldest of each agent that is not busy.

        Also when there are enough, or `limit` is 0, it reads on for a moment: whose turn it is shows only among jobs
        whose agents are known.
        Looking stops at a suspect, which is claimed when `nothing_runs`; else `waits_for_quiet` says that it waits.
        Nothing is claimed when `lease_value` does not stand in the queue's lease any more.
        """
        self._look()
        begin = time.perf_counter()
        while True:
            chosen, self.waits_for_quiet = self._lineup.choose(limit, busy_agents, nothing_runs=nothing_runs)
            if self.waits_for_quiet or time.perf_counter() > begin + _learn_s(limit, len(chosen)) or not self._learn():
                break
        if not chosen:
            return []
        found = self._claim(keys=self._claim_keys, args=[lease_value, *map(raw, chosen)])
        if found is None:
            return []
        claimed = [text(job_id) for job_id in found]
        for job_id in claimed:
            self._lineup.serve(job_id)
        for job_id in chosen:  # one that was not claimed was taken from the list by somebody else
            self._lineup.discard(job_id)
            self._learned.pop(job_id, None)
        return claimed

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that the last looks came across."""
        return self._lineup.agents()

    def _look(self) -> None:
        """Take in what came in at either end since the last look, a page at a time."""
        for _ in range(2):
            first, last = self._lineup.first(_KNOWN_ENDS), self._lineup.last(_KNOWN_ENDS)
            args: list[str | bytes | int] = [_PAGE, len(first), *map(raw, first), *map(raw, last)]
            length, goes_on, before, behind = self._look_at(keys=[self._key], args=args)
            if not goes_on:
                self._lineup.clear()
            self._lineup.prepend(map(text, before))
            self._lineup.append(map(text, behind))
            unknown = length - len(self._lineup)
            is_whole = len(behind) < _PAGE
            # Somebody removed many, or put some where nobody does: an id that stands there twice looks like that too.
            if not is_whole or (unknown >= -_MAX_GONE and not (unknown > 0 and self._may_start_over.is_due())):
                return
            self._lineup.clear()

    def _learn(self) -> bool:
        """Find out whose some of the next jobs are; ``False`` when that is known of all."""
        job_ids = self._lineup.unlearned(_READ_AT_ONCE)
        self._read([job_id for job_id in job_ids if job_id not in self._learned])
        for job_id in job_ids:
            agent_id, suspect = self._learned[job_id]
            self._lineup.learn(job_id, agent_id, suspect=suspect)
        return bool(job_ids)

    def _read(self, job_ids: list[str]) -> None:
        if not job_ids:
            return
        if len(self._learned) > _MAX_REMEMBERED:
            self._learned.clear()  # jobs that others took from the list are never forgotten one by one
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hmget(raw(Job.key_for(job_id)), "data", FIELD_ATTEMPTS)
            # A key that is no hash is one unreadable job, not a failure of the look.
            for job_id, reply in zip(job_ids, pipeline.execute(raise_on_error=False), strict=True):
                data, deaths = (None, None) if isinstance(reply, Exception) else cast(list[bytes | None], reply)
                self._learned[job_id] = agent_in(data), as_count(deaths) > 0


def _learn_s(limit: int, n_chosen: int) -> float:
    if 0 < limit == n_chosen:
        return _LEARN_WHEN_DONE_S
    return _LEARN_S if n_chosen or limit == 0 else _LEARN_WHEN_IDLE_S
