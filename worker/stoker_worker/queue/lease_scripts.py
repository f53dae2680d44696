"""The scripts with which a worker takes, renews, describes and leaves the lease of a member (`lease.py`).

Owns their text and nothing else.
"""

from typing import Final

# KEYS: lease, fence, members, stores of members that left, how often each member renewed its lease, and for each queue
# the key that shows producers that it is served. Each script compares the stored holder with the one the caller
# expects, so that no step acts on an old reading. A worker that is refused gets no number: that would depose the
# holder. A member that joins is in the set of members from the moment in which it holds its lease; after a crash, as it
# was before, until its jobs are put back. A worker of an earlier version serves a queue alone, and has its lease, which
# is JSON, in the key of the queue.
TAKE: Final = """
for i = 6, ARGV[5] == '1' and #KEYS or 0 do
  local only = redis.call('GET', KEYS[i])
  if only and string.sub(only, 1, 1) == '{' then
    if only ~= ARGV[1] then return {only, 0, redis.call('PTTL', KEYS[i]), ''} end
    redis.call('DEL', KEYS[i])
  end
end
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return {held, 0, redis.call('PTTL', KEYS[1]), ''} end
local fence = redis.call('INCRBY', KEYS[2], 1)
redis.call('PERSIST', KEYS[2])
local mine = '{"fence": ' .. fence .. ', ' .. string.sub(ARGV[2], 2)
local before = redis.call('HGET', KEYS[3], ARGV[4]) or ''
redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
if ARGV[5] == '1' then
  if before == '' then redis.call('HSET', KEYS[3], ARGV[4], mine) end
  redis.call('HDEL', KEYS[4], ARGV[6])
  for i = 6, #KEYS do redis.call('SET', KEYS[i], ARGV[4], 'PX', ARGV[3]) end
end
return {mine, fence, 0, before}
"""

HOLDS: Final = """
local function holds(lease, fence, mine, number, ttl_ms)
  local held = redis.call('GET', lease)
  if held == mine then return true end
  local last, most = redis.call('GET', fence) or '0', tonumber(number)
  if held then last, most = string.match(held, '"fence": (%d+)') or '', most - 1 end
  if (tonumber(last) or math.huge) > most then return false end
  redis.call('SET', fence, number)
  redis.call('SET', lease, mine, 'PX', ttl_ms)
  return true
end
"""
"""Lua: whether the lease is ours. A lease that ran out while Redis was away is taken up again, unless another worker
has held it since: then our jobs in flight were that worker's to recover, even if it has left. A server that has lost
its data has no number, or that of an earlier holder, perhaps with that holder's lease. Called with `Lease.keys` and
`Lease.args`."""

RENEW: Final = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
if not redis.call('HGET', KEYS[3], ARGV[4]) then redis.call('HSET', KEYS[3], ARGV[4], ARGV[5]) end
for i = 6, #KEYS do redis.call('SET', KEYS[i], ARGV[4], 'PX', ARGV[3]) end
return redis.call('HINCRBY', KEYS[5], ARGV[4], 1)
"""
)
RELEASE: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

# ARGV: the value, the member, what the others see of it from now on, the number of its queues. After those KEYS: the
# counts of the queues that it served before, and serves no more.
DESCRIBE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
for i = 6 + ARGV[4], #KEYS do redis.call('HINCRBY', KEYS[i], 'moves', 1) end
return 1
"""

MOST_LEFT: Final = 1000
FENCE_KEPT_S: Final = 30 * 86_400
"""Names and stores that are used once, as by containers, would fill the server otherwise. Whoever sleeps for longer
finds that its executions and claimed ids are gone."""

# From here on the member's agents are anybody's. After those KEYS: the counts of its queues.
LEAVE: Final = (
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local record = redis.call('HGET', KEYS[3], ARGV[2]) or ''
local more = string.find(record, '"loading": true') and ' unready' or ''
if string.find(record, '"shared": "%x') then more = more .. ' shared' end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('HDEL', KEYS[5], ARGV[2])
redis.call('HSET', KEYS[4], ARGV[3], redis.call('TIME')[1] .. ' ' .. ARGV[2] .. more)
"""
    + f"if redis.call('HLEN', KEYS[4]) > {MOST_LEFT} then"
    + """
  local all, oldest, least = redis.call('HGETALL', KEYS[4]), '', math.huge
  for i = 1, #all, 2 do
    local at = tonumber(string.match(all[i + 1], '^%d+')) or 0
    if at < least then oldest, least = all[i], at end
  end
  redis.call('HDEL', KEYS[4], oldest)
end
local n_queues, is_last = (#KEYS - 5) / 2, redis.call('HLEN', KEYS[3]) == 0
for i = 6, 5 + n_queues do
  if is_last then redis.call('DEL', KEYS[i]) end -- else it expires, unless another one serves the queue
  redis.call('HINCRBY', KEYS[i + n_queues], 'moves', 1)
end
"""
    + f"redis.call('PEXPIRE', KEYS[2], {FENCE_KEPT_S}000)"
    + """
return redis.call('DEL', KEYS[1])
"""
)
