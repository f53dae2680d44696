"""The scripts with which a worker takes, renews, describes and leaves the lease of a member (`lease.py`).

Owns their text and nothing else.
"""

from typing import Final

# KEYS: lease, fence, members, how often each member renewed its lease; then, unless the lease is taken to put a dead
# member's jobs back, for each queue `SERVED_KEY` and `STORE_KEY`.
#
# ARGV: the lifetime, the member, its description, its store, its shared store, what `SERVED_KEY` and `STORE_KEY` get;
# whether `STORE_KEY` is looked at first; and what may be in the way, because its workers are certainly gone, or
# this store may follow that one.
#
# The reply: `taken`, the lease's value, its number, what was known of the member before. Or what is in the way, its
# value, for how many milliseconds, and at which queue: `held`, the lease; `served`, who serves a queue; `kept`, its
# store; `copied`, another member's record: its store is a copy of this one.
#
# Each script compares what is stored with what the caller expects, so that no step acts on an old reading. A worker
# that is refused gets no number: that would depose the holder. A member that joins is in the set of members from the
# moment in which it holds its lease; after a crash, as it was before, until its jobs are put back.
TAKE: Final = """
local ttl_ms, me, mine, store, shared, share, kept = unpack(ARGV, 1, 7)
local store_first, first, passed = ARGV[8] == '1', 5, {}
for i = 9, #ARGV do passed[ARGV[i]] = true end

local function kept_elsewhere()
  for i = first, #KEYS, 2 do
    local found = redis.call('GET', KEYS[i + 1])
    if found and found ~= kept and not passed[found] then return {'kept', found, 0, (i - first) / 2} end
  end
end
local function served_by_others()
  for i = first, #KEYS, 2 do
    local found = redis.call('GET', KEYS[i])
    if found and found ~= share and not passed[found] then
      return {'served', found, redis.call('PTTL', KEYS[i]), (i - first) / 2}
    end
  end
end
local function copied()
  local all = shared ~= '' and #KEYS > 4 and redis.call('HGETALL', KEYS[3]) or {}
  for i = 1, #all, 2 do
    local record = all[i + 1]
    local is_same = string.find(record, '"store": "' .. store .. '"', 1, true)
      and string.find(record, '"shared": "' .. shared .. '"', 1, true)
    if is_same and all[i] ~= me and not passed[record] then return {'copied', record, 0, 0} end
  end
end

local held = redis.call('GET', KEYS[1])
local refused = store_first and kept_elsewhere()
  or held and not passed[held] and {'held', held, redis.call('PTTL', KEYS[1]), 0}
  or served_by_others() or kept_elsewhere() or copied()
if refused then return refused end
local fence = redis.call('INCRBY', KEYS[2], 1)
redis.call('PERSIST', KEYS[2])
local value = '{"fence": ' .. fence .. ', ' .. string.sub(mine, 2)
local before = redis.call('HGET', KEYS[3], me) or ''
redis.call('SET', KEYS[1], value, 'PX', ttl_ms)
if before == '' and #KEYS > 4 then redis.call('HSET', KEYS[3], me, value) end
for i = first, #KEYS, 2 do
  redis.call('SET', KEYS[i], share, 'PX', ttl_ms)
  redis.call('SET', KEYS[i + 1], kept)
end
return {'taken', value, fence, before}
"""

HOLDS: Final = """
local function holds(lease, fence, mine, number, ttl_ms)
  local held = redis.call('GET', lease)
  if held == mine then return true end
  local last, most = redis.call('GET', fence) or '0', tonumber(number)
  if held then last, most = string.match(held, '"fence": (%d+)') or '', most - 1 end
  if (tonumber(last) or math.huge) > most then return false end
  local me, share = cjson.decode(mine), 'only ' .. string.sub(lease, #'stoker:holder:' + 1)
  if me.shared ~= '' then share = 'shared ' .. me.shared .. ' ' .. me.model end
  local queues = me.recovers and {} or me.queues
  for _, queue in ipairs(queues) do
    if (redis.call('GET', 'stoker:lease:' .. queue) or share) ~= share then return false end
  end
  for _, queue in ipairs(queues) do redis.call('SET', 'stoker:lease:' .. queue, share, 'PX', ttl_ms) end
  redis.call('SET', fence, number)
  redis.call('SET', lease, mine, 'PX', ttl_ms)
  return true
end
"""
"""Lua: whether the lease is ours. A lease that ran out while Redis was away is taken up again, unless another worker
has held it since, or serves one of its queues: then our jobs in flight were that worker's to recover, even if it has
left. It is never taken up without its queues. A server that has lost its data has no number, or that of an earlier
holder, perhaps with that holder's lease. Called with `Lease.keys` and `Lease.args`."""

# ARGV, after those of `HOLDS`: the member, its record, and what `SERVED_KEY` and `STORE_KEY` get. If another member has
# begun to serve one of the queues, while this one slept or after Redis had lost its data, this one is deposed: it may
# end none of its jobs any more. The reply is how often the lease was renewed; 0: another worker has it; or as of `TAKE`
# if a queue is served by others.
RENEW: Final = (
    HOLDS
    + """
local first, share, kept = 5, ARGV[6], ARGV[7]
for i = first, #KEYS, 2 do
  local found = redis.call('GET', KEYS[i])
  if found and found ~= share then
    if (redis.call('GET', KEYS[1]) or ARGV[1]) == ARGV[1] then
      redis.call('DEL', KEYS[1])
      redis.call('INCRBY', KEYS[2], 1)
    end
    return {'served', found, redis.call('PTTL', KEYS[i]), (i - first) / 2}
  end
end
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
if not redis.call('HGET', KEYS[3], ARGV[4]) then redis.call('HSET', KEYS[3], ARGV[4], ARGV[5]) end
for i = first, #KEYS, 2 do
  redis.call('SET', KEYS[i], share, 'PX', ARGV[3])
  if redis.call('GET', KEYS[i + 1]) ~= kept then redis.call('SET', KEYS[i + 1], kept) end
end
return redis.call('HINCRBY', KEYS[4], ARGV[4], 1)
"""
)
RELEASE: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

# ARGV: the value, the member, what the others see of it from now on.
DESCRIBE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
return 1
"""

FENCE_KEPT_S: Final = 30 * 86_400
"""Names and stores that are used once, as by containers, would fill the server otherwise. Whoever sleeps for longer
finds that its executions and claimed ids are gone."""

# ARGV: the value, the member, what it has at `SERVED_KEY`, and the queues. The last member that serves a
# queue leaves it to any other.
LEAVE: Final = (
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('HDEL', KEYS[4], ARGV[2])
local is_served = {}
for _, record in ipairs(#KEYS > 4 and redis.call('HVALS', KEYS[3]) or {}) do
  local is_json, member = pcall(cjson.decode, record)
  if is_json and type(member) == 'table' and type(member.queues) == 'table' then
    for _, queue in ipairs(member.queues) do is_served[queue] = true end
  end
end
for i = 5, #KEYS, 2 do
  if not is_served[ARGV[(i + 3) / 2]] and redis.call('GET', KEYS[i]) == ARGV[3] then redis.call('DEL', KEYS[i]) end
end
"""
    + f"redis.call('PEXPIRE', KEYS[2], {FENCE_KEPT_S}000)"
    + """
return redis.call('DEL', KEYS[1])
"""
)
