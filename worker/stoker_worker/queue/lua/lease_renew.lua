-- After holds.lua. KEYS: as in lease_take.lua. ARGV, after those of `holds`: the member, its record, and the values for
-- `SERVED_KEY` and, unless it is empty, for `STORE_KEY`. If workers that this one may not join serve one of its queues,
-- because it slept or Redis lost its data, this one is deposed: it may end none of its jobs any more. The reply: how
-- often the lease was renewed; 0: another worker has it; or `served` as in lease_take.lua.
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
redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- a full server refuses a SET that is a script's first write
if not redis.call('HGET', KEYS[3], ARGV[4]) then redis.call('HSET', KEYS[3], ARGV[4], ARGV[5]) end
for i = first, #KEYS, 2 do
  redis.call('SET', KEYS[i], share, 'PX', ARGV[3])
  if kept ~= '' and redis.call('GET', KEYS[i + 1]) ~= kept then redis.call('SET', KEYS[i + 1], kept) end
end
return redis.call('HINCRBY', KEYS[4], ARGV[4], 1)
