-- Enqueues due jobs, for the holder of the lease and of RQ's scheduler lock. Returns how many left the registry.
if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('GET', KEYS[4]) ~= ARGV[2] then return 0 end
local taken = 0
for i = 5, #KEYS do
  local job, job_id = KEYS[i], ARGV[i]
  local due = redis.call('ZREM', KEYS[1], job_id)
  taken = taken + due
  if due == 1 and redis.call('TYPE', job).ok == 'hash' then
    local f = redis.call('HMGET', job, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at', 'ttl')
    local front = f[1] == '1' or (f[2] == '1' and f[3] and f[3] ~= '')
    redis.call('HSET', job, 'status', 'queued', 'origin', ARGV[3], 'enqueued_at', ARGV[4])
    local ttl = tonumber(f[4] or '')
    if ttl and ttl > 0 then redis.call('EXPIRE', job, ttl) end
    redis.call(front and 'LPUSH' or 'RPUSH', KEYS[2], job_id)
  end
end
return taken
