-- The heartbeat of a run. One that is gone is not brought back. The job's own keys may have any type: errors are
-- ignored, because they would keep the runs behind this one without a heartbeat.
local job, execution, wip, of_job, of_worker = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, member, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', execution) == 0 then return 0 end
redis.call('HSET', execution, 'last_heartbeat', ARGV[4])
redis.call('EXPIRE', execution, ttl)
redis.call('ZADD', wip, 'XX', math.floor(now) + ttl, member)
redis.pcall('ZADD', of_job, 'XX', math.floor(now) + ttl + 60, id)
redis.call('EXPIRE', of_job, ttl + 60)
redis.call('SADD', of_worker, member)
redis.call('EXPIRE', of_worker, ttl + 60)
if redis.call('EXISTS', job) == 1 then redis.pcall('HSET', job, 'last_heartbeat', ARGV[5]) end
return 1
