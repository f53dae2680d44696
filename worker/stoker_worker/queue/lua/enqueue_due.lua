-- After enqueue.lua. Moves due jobs from a registry to their queue, if the caller holds the lease and RQ's scheduler
-- lock. If a status is given, jobs of another one only leave the registry. Returns how many left it.
if redis.call('GET', KEYS[2]) ~= ARGV[1] or redis.call('GET', KEYS[3]) ~= ARGV[2] then return 0 end
local taken, status = 0, ARGV[5]
for i = 6, #ARGV do
  local job = 'rq:job:' .. ARGV[i]
  local due = redis.call('ZREM', KEYS[1], ARGV[i])
  taken = taken + due
  local is_job = due == 1 and redis.call('TYPE', job).ok == 'hash'
  if is_job and (status == '' or redis.call('HGET', job, 'status') == status) then
    enqueue(ARGV[i], ARGV[3], ARGV[4])
  end
end
return taken
