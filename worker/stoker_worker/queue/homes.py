"""The homes of agents: the member that claims an agent's jobs, and the store that has its memory.

Owns the entries of `HOMES_KEY`; the claim script (`claim_scripts.py`) decides by them, and changes them with each claim
of an agent that has no home or whose home is gone. A worker enters an agent in all of its queues, and looks into all of
them, so two workers that have any queue in common never work on one agent at a time. Fetcher thread; `keep` also
finisher threads.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from redis import Redis
from redis.client import Pipeline
from rq.job import Job

from stoker_shared.wire import COUNTS_KEY, FIELD_TRIED, HOMES_KEY, LEFT_KEY, MEMBERS_KEY
from stoker_worker.queue.keeping import Keeping
from stoker_worker.queue.lease import Lease

NOBODY: Final = "-"
_HERE: Final = "="
_UNTIL: Final = ">"

WORDS: Final = (
    f"""
local homes_of, job_of, tried = '{HOMES_KEY.format(queue="")}', '{Job.redis_job_namespace_prefix}', '{FIELD_TRIED}'
"""
    + """
local function words(entry)
  local home, kept, version, former = string.match(entry or '', '^(%S+) (%S+) ?(%d*) ?(%S*)$')
  if kept == '=' then kept = home end
  return home or '-', kept or '-', version or '', former or ''
end
local function entry_of(home, kept, version, former)
  local entry = home .. ' ' .. (kept == home and '=' or kept)
  if former and former ~= '' then return entry .. ' ' .. (version == '' and '0' or version) .. ' ' .. former end
  return version == '' and entry or entry .. ' ' .. version
end
local function is_on_its_way(job_id)
  local job = redis.pcall('HMGET', job_of .. job_id, 'status', tried, 'created_at')
  if job.err or not job[2] or not job[3] or string.sub(job[2], 1, #job[3] + 1) ~= job[3] .. ' ' then return false end
  return job[1] == 'queued' or job[1] == 'started' or job[1] == 'scheduled'
end
local function serves(members, name, homes)
  if string.sub(name, 1, 1) == '>' then return is_on_its_way(string.sub(name, 2)) end
  local is_record, record = pcall(cjson.decode, redis.call('HGET', members, name) or '')
  if not is_record or type(record) ~= 'table' or type(record.queues) ~= 'table' then return false end
  for _, queue in ipairs(record.queues) do
    if homes == homes_of .. queue then return true end
  end
  return false
end
"""
)
"""Lua: an agent's home and the store that has its memory, each `-` if there is none; its version and its home before,
each empty if none is noted; and back. And whether a member serves the queue with these homes: otherwise it is no home
there. A job that has gone on to another queue keeps its agent as a home does, until it has ended."""

# KEYS: lease, counts of all queues, homes of all queues. ARGV: lease's value, member, then for each agent its id and
# whether it may go with what is stored of it. An agent that is set free stays free for everybody, this member included.
_GIVE_UP = (
    WORDS
    + """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local me, n_queues, given = ARGV[2], (#KEYS - 1) / 2, 0
for i = 3, #ARGV, 2 do
  local was_given = 0
  for k = 2 + n_queues, #KEYS do
    local home, kept, version = words(redis.call('HGET', KEYS[k], ARGV[i]))
    if home == me and (kept == '-' or ARGV[i + 1] == '1') then
      if kept == '-' then
        redis.call('HDEL', KEYS[k], ARGV[i])
      else
        redis.call('HSET', KEYS[k], ARGV[i], entry_of('-', kept, version))
      end
      was_given = 1
    end
  end
  given = given + was_given
end
if given > 0 then
  for k = 2, 1 + n_queues do redis.call('HINCRBY', KEYS[k], 'moves', 1) end
end
return given
"""
)

# KEYS: lease, members, homes of all queues. ARGV: lease's value, member, agent (one that is about to be made), store,
# whether memory travels between stores.
_HOLD = (
    WORDS
    + """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return ARGV[2] end
for k = 3, #KEYS do
  local home, kept = words(redis.call('HGET', KEYS[k], ARGV[3]))
  if home ~= '-' and home ~= ARGV[2] and serves(KEYS[2], home, KEYS[k]) then return home end
  if kept ~= '-' and kept ~= ARGV[4] and ARGV[5] == '0' then return kept end
end
local former = ARGV[5] == '1' and '-' or ''
for k = 3, #KEYS do
  local home, kept, version = words(redis.call('HGET', KEYS[k], ARGV[3]))
  if home ~= ARGV[2] then redis.call('HSET', KEYS[k], ARGV[3], entry_of(ARGV[2], kept, version, former)) end
end
return ''
"""
)


# KEYS: lease, members, stores of members that left, counts of all queues, homes of all queues. ARGV: lease's value,
# member, its store, then for each agent its id and its last version. Where some worker has no shared store, another
# store may have an older conversation of the agent, which must not come up again.
_FORGET = (
    WORDS
    + """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local n_queues, me, store, n_shared, n_gone = (#KEYS - 3) / 2, ARGV[2], ARGV[3], 0, 0
local records = redis.call('HVALS', KEYS[2])
for _, record in ipairs(records) do
  if string.find(record, '"shared": "%x') then n_shared = n_shared + 1 end
end
local is_only_store = #records == 1 and redis.call('HLEN', KEYS[3]) == 0
if n_shared < #records and not is_only_store then return 0 end
for i = 4, #ARGV, 2 do
  local is_gone = true
  for k = 4 + n_queues, #KEYS do
    local home, kept, version = words(redis.call('HGET', KEYS[k], ARGV[i]))
    local is_mine = (home == me or home == '-') and (kept == store or kept == '-')
    is_gone = is_gone and is_mine and tonumber(version == '' and 0 or version) <= tonumber(ARGV[i + 1])
  end
  for k = 4 + n_queues, is_gone and #KEYS or 0 do n_gone = n_gone + redis.call('HDEL', KEYS[k], ARGV[i]) end
end
for k = 4, n_gone > 0 and 3 + n_queues or 0 do redis.call('HINCRBY', KEYS[k], 'moves', 1) end
return n_gone
"""
)


# KEYS: counts of all queues, homes of all queues. ARGV: agent, its home from now on.
_HOLD_BACK = (
    WORDS
    + """
local n_queues = #KEYS / 2
for k = n_queues + 1, #KEYS do
  local _, kept, version = words(redis.call('HGET', KEYS[k], ARGV[1]))
  redis.call('HSET', KEYS[k], ARGV[1], entry_of(ARGV[2], kept, version))
end
if ARGV[2] == '-' then
  for k = 1, n_queues do redis.call('HINCRBY', KEYS[k], 'moves', 1) end
end
"""
)


def as_field(agent_id: str) -> bytes:
    """An agent's field in `HOMES_KEY`. Only an id that is refused anyway has characters that are no UTF-8."""
    return agent_id.encode(errors="replace")


class Home(NamedTuple):
    """`member`: the agent's home; `store`: where its memory is; each is `NOBODY` for none. `version`: may be empty."""

    member: str
    store: str
    version: str = ""

    @classmethod
    def of(cls, entry: bytes | None) -> "Home":
        found = (entry or b"").decode(errors="replace").split(" ")
        if not 2 <= len(found) <= 4:
            return cls(NOBODY, NOBODY)
        return cls(found[0], found[0] if found[1] == _HERE else found[1], *found[2:3])


class Homes:
    """The entries of one worker's queues."""

    def __init__(self, connection: Redis, lease: Lease, *, memory_travels: bool = False) -> None:
        """`memory_travels`: whether there is a shared store."""
        self._connection = connection
        self._lease = lease
        self._memory_travels = memory_travels
        self.keys = {queue: HOMES_KEY.format(queue=queue) for queue in lease.queues}
        self._count_keys = [COUNTS_KEY.format(queue=queue) for queue in lease.queues]
        self._give_up = connection.register_script(_GIVE_UP)
        self._hold = connection.register_script(_HOLD)
        self._forget = connection.register_script(_FORGET)
        self._hold_back = connection.register_script(_HOLD_BACK)

    def give_up(self, agents: Mapping[str, bool]) -> int:
        """Set agents free of which this worker has no job in flight; returns how many were at home here.

        Args:
            agents: each with whether it may go although its memory is in a store.
        """
        if not agents:
            return 0
        keys = [self._lease.keys[0], *self._count_keys, *self.keys.values()]
        args: list[str | bytes | int] = [self._lease.value, self._lease.member]
        for agent_id, with_memory in agents.items():
            args += [as_field(agent_id), int(with_memory)]
        given: int = self._give_up(keys=keys, args=args)
        return given

    def forget(self, agents: Mapping[str, int]) -> None:
        """This worker's store has removed these agents at these versions, and no job of theirs is in flight here: they
        need no entry, unless another store has something of them."""
        if agents:
            args: list[str | bytes | int] = [self._lease.value, self._lease.member, self._lease.store]
            for agent_id, version in agents.items():
                args += [as_field(agent_id), version]
            keys = [self._lease.keys[0], MEMBERS_KEY, LEFT_KEY, *self._count_keys, *self.keys.values()]
            self._forget(keys=keys, args=args)

    def hold(self, agent_id: str) -> str | None:
        """Make this worker the home of an agent that a job is about to make; another member or store that has the
        agent, or ``None``."""
        args: list[str | bytes | int] = [self._lease.value, self._lease.member, as_field(agent_id), self._lease.store]
        args.append(int(self._memory_travels))
        found: bytes = self._hold(keys=[self._lease.keys[0], MEMBERS_KEY, *self.keys.values()], args=args)
        return found.decode() or None

    def hold_back(self, pipeline: Pipeline, agent_id: str, *, until: str | None) -> None:
        """With the transaction in which a job that writes the agent's turn goes on to the next model: the agent gets
        another home, and its other jobs wait.

        Args:
            until: the job, if it goes to another queue: they wait until it has ended. In the same queue they are behind
                it anyway.
        """
        home = NOBODY if until is None else f"{_UNTIL}{until}"
        keys = [*self._count_keys, *self.keys.values()]
        self._hold_back(keys=keys, args=[as_field(agent_id), home], client=pipeline)

    def keep(self, pipeline: Pipeline, keeping: Keeping, result: Mapping[str, Any]) -> None:
        """With the end of a job that has changed an agent: its memory is in this worker's store now, or nowhere.

        Where memory travels, its version is noted too, by which a worker knows whether it has all of it. Once one is
        noted, workers without a shared store go on counting: their turns are missed by those that have one.
        """
        version = keeping.version_after(result) if self._memory_travels else keeping.unshared_version_after(result)
        for key in self.keys.values():
            if keeping.forgets and not version:
                pipeline.hdel(key, as_field(keeping.agent_id))
            elif version or not keeping.is_here:
                pipeline.hset(key, mapping={as_field(keeping.agent_id): self._entry(version)})

    def _entry(self, version: int) -> str:
        member, store = self._lease.member, self._lease.store
        entry = f"{member} {_HERE if store == member else store}"
        return f"{entry} {version}" if version else entry
