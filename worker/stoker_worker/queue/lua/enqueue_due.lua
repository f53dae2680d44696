-- After enqueue.lua. Enqueues due jobs, for the holder of the lease and of RQ's scheduler lock. Returns how many left the
-- registry.
if redis.call('GET', KEYS[2]) ~= ARGV[1] or redis.call('GET', KEYS[3]) ~= ARGV[2] then return 0 end
local taken = 0
for i = 5, #ARGV do
  local due = redis.call('ZREM', KEYS[1], ARGV[i])
  taken = taken + due
  if due == 1 and redis.call('TYPE', 'rq:job:' .. ARGV[i]).ok == 'hash' then enqueue(ARGV[i], ARGV[3], ARGV[4]) end
end
return taken
