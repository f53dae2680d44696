"""Looks ahead in a queue and claims chosen jobs. Owns the memory of which waiting job is which agent's; inbox thread.

RQ's own dequeue takes the head whatever it is. An agent's jobs must run one at a time and in order, without holding up
other agents, so claiming walks the list from its head and passes by agents that are busy. The list itself is not
touched until a job is claimed: its length stays true for operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from redis import Redis
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue

from stoker_shared.wire import FIELD_ATTEMPTS, LEASE_KEY
from stoker_worker.rq_worker.json_job import agent_in, as_count

# All or nothing for each id: after a crash it is in the queue or in the intermediate list, never nowhere.
_CLAIM = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return {} end
local claimed = {}
for i = 2, #ARGV do
  if redis.call('LREM', KEYS[1], 1, ARGV[i]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i])
    claimed[#claimed + 1] = ARGV[i]
  end
end
return claimed
"""

_PAGE = 100
_READ_AT_ONCE = 20  # payloads; each may be megabytes
_MAX_LOOK = 20_000
_MAX_REMEMBERED = 100_000


@dataclass(frozen=True)
class _Waiting:
    agent_id: str | None
    suspect: bool


class Backlog:
    """The waiting jobs of one queue.

    A job that was in flight under every worker that died so far but one is a suspect: it runs alone, so that a job
    which kills its workers takes no others down with it.
    """

    def __init__(self, connection: Redis, queue_name: str, *, suspect_after: int) -> None:
        """
        Args:
            suspect_after: deaths with a job in flight that make it a suspect.
        """
        self._connection = connection
        self._name = queue_name
        self._key = Queue(queue_name, connection=connection).key
        self._intermediate_key = IntermediateQueue.get_intermediate_queue_key(self._key)
        self._claim = connection.register_script(_CLAIM)
        self._suspect_after = suspect_after
        self._known: dict[str, _Waiting] = {}
        self._agents: frozenset[str] | None = None
        self.waits_for_quiet = False

    def claim(self, limit: int, busy_agents: frozenset[str], lease_value: str, *, nothing_runs: bool) -> list[str]:
        """Move up to `limit` job ids to the intermediate list: the oldest of each agent that is not busy.

        Looking stops at a suspect, which is claimed when `nothing_runs`; else `waits_for_quiet` says that it waits.
        Nothing is claimed when `lease_value` does not stand in the queue's lease any more.
        """
        if len(self._known) > _MAX_REMEMBERED:
            self._forget(list(self._known))  # jobs that others took out are forgotten only where a look ends
        self.waits_for_quiet = False
        chosen: list[str] = []
        taken = set(busy_agents)
        for job_id in self._waiting():
            waiting = self._known[job_id]
            agent_id = waiting.agent_id
            if waiting.suspect:
                self.waits_for_quiet = bool(chosen) or not nothing_runs
                if not self.waits_for_quiet:
                    chosen.append(job_id)
                break
            if agent_id is None or agent_id not in taken:
                chosen.append(job_id)
                if agent_id is not None:
                    taken.add(agent_id)
            if len(chosen) == limit:
                break
        if not chosen:
            return []
        keys = [self._key, self._intermediate_key, LEASE_KEY.format(queue=self._name)]
        claimed = [_text(job_id) for job_id in self._claim(keys=keys, args=[lease_value, *map(_raw, chosen)])]
        self._forget(claimed)
        return claimed

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that the last looks came across."""
        if self._agents is None:
            agents = (waiting.agent_id for waiting in self._known.values())
            self._agents = frozenset(agent_id for agent_id in agents if agent_id is not None)
        return self._agents

    def _waiting(self) -> Iterator[str]:
        """Job ids from the head on, page by page, each with its agent looked up."""
        seen: set[str] = set()
        for start in range(0, _MAX_LOOK, _PAGE):
            page = cast(list[bytes], self._connection.lrange(self._key, start, start + _PAGE - 1))
            ids = [_text(job_id) for job_id in page]
            unknown = [job_id for job_id in ids if job_id not in self._known]
            for at in range(0, len(unknown), _READ_AT_ONCE):
                self._learn(unknown[at : at + _READ_AT_ONCE])
            seen.update(ids)
            yield from ids
            if len(ids) < _PAGE:
                if len(seen) < len(self._known):  # this was all: others took the rest
                    self._forget([job_id for job_id in self._known if job_id not in seen])
                return

    def _forget(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            self._known.pop(job_id, None)
        if job_ids:
            self._agents = None

    def _learn(self, job_ids: list[str]) -> None:
        self._agents = None if job_ids else self._agents
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hmget(_raw(Job.key_for(job_id)), "data", FIELD_ATTEMPTS)
            # A key that is no hash is one unreadable job, not a failure of the look.
            for job_id, reply in zip(job_ids, pipeline.execute(raise_on_error=False), strict=True):
                data, deaths = (None, None) if isinstance(reply, Exception) else reply
                self._known[job_id] = _Waiting(agent_in(data), suspect=as_count(deaths) >= self._suspect_after)


def _text(job_id: bytes) -> str:
    """Any bytes can be pushed onto a list; what is no text comes back from `_raw` unchanged."""
    return job_id.decode(errors="surrogateescape")


def _raw(job_id: str) -> bytes:
    return job_id.encode(errors="surrogateescape")
