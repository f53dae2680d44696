-- After holds.lua and count.lua. Ends a run whose answer was rejected, and puts its job in front of the next model's
-- queue. The push comes first: it may be refused, because of what the key holds, and then nothing has changed. The
-- attempts that a lost reply was about are those in the hash, or the first of them, after the next model's answer.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, execution, started, executions, of_worker, queues, queue = unpack(KEYS, 3, 9)
local job_id, execution_id, member, origin, created_at, field, tried, ttl_s = unpack(ARGV, 4, 11)
if redis.call('EXISTS', execution) == 0 then
  local found = redis.pcall('HGET', job, field)
  return type(found) == 'string' and string.sub(found, 1, #tried - 1) == string.sub(tried, 1, -2) and 1 or 0
end
if redis.pcall('HGET', job, 'status') ~= 'started' then return 0 end
redis.call('LPUSH', queue, job_id)
redis.pcall('SADD', queues, queue)
redis.call('HSET', job, 'status', 'queued', 'origin', origin, 'created_at', created_at, field, tried)
redis.call('HDEL', job, 'worker_name', unpack(ARGV, 16))
if tonumber(ttl_s) > 0 then redis.call('EXPIRE', job, ttl_s) end
redis.call('DEL', execution)
redis.pcall('ZREM', started, member)
redis.pcall('ZREM', executions, execution_id)
redis.pcall('SREM', of_worker, member)
count(KEYS[10], unpack(ARGV, 12, 15))
return 1
