"""The scripts that read and change the homes of agents (`homes.py`). Owns their text and nothing else."""

from typing import Final

from rq.job import Job

from stoker_shared.wire import FIELD_TRIED, HOMES_KEY

WORDS: Final = (
    f"""
local homes_of, job_of, tried = '{HOMES_KEY.format(queue="")}', '{Job.redis_job_namespace_prefix}', '{FIELD_TRIED}'
"""
    + """
local function words(entry)
  local home, kept, version, former = string.match(entry or '', '^(%S+) (%S+) ?(%d*) ?(%S*)$')
  if kept == '=' then kept = home end
  if version == '0' then version = '' end
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
GIVE_UP: Final = (
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
HOLD: Final = (
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
FORGET: Final = (
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
HOLD_BACK: Final = (
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

# KEYS: homes of one queue. ARGV: agent, the job as the agent's home, the store that has its memory now, the version of
# that, how many numbers the turn has used up at least. An agent that others have gone on with is theirs.
KEEP_ELSEWHERE: Final = (
    WORDS
    + """
local home, _, version = words(redis.call('HGET', KEYS[1], ARGV[1]))
if home ~= ARGV[2] then return end
local number = math.max(tonumber(ARGV[4]), version == '' and 0 or version + tonumber(ARGV[5]))
redis.call('HSET', KEYS[1], ARGV[1], entry_of(home, ARGV[3], number == 0 and '' or string.format('%d', number)))
"""
)
