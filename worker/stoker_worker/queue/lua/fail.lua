-- After holds.lua. Fails a job without RQ's objects. Takes effect once, and for the holder of the lease only: the id is
-- in its queue until then, or its execution among the started ones. No key of the job has a type that one can
-- rely on.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return -1 end
local job, results, failed, job_id, member = KEYS[4], KEYS[5], KEYS[6], ARGV[4], ARGV[11]
local n_found
if member == '' then
  n_found = redis.call('LREM', KEYS[3], 1, job_id)
else
  n_found = redis.call('ZREM', KEYS[7], member)
  redis.call('DEL', KEYS[8])
  redis.pcall('ZREM', KEYS[9], ARGV[12])
  redis.pcall('SREM', KEYS[10], member)
end
if n_found == 0 then return -1 end
local status = redis.pcall('HGET', job, 'status') -- false, or an error, if there is no job
local is_over = status == 'finished' or status == 'failed' or status == 'stopped' or status == 'canceled'
if type(status) == 'table' or is_over or redis.call('EXISTS', job) == 0 then return 0 end
if member ~= '' and status ~= 'started' then return 0 end
local ttl_s = math.floor(tonumber(redis.call('HGET', job, 'failure_ttl')) or -2)
if not (ttl_s >= -1 and ttl_s < 1e9) then ttl_s = tonumber(ARGV[9]) end
redis.call('HSET', job, 'status', 'failed', 'ended_at', ARGV[5], 'exc_info', ARGV[6])
redis.call('HDEL', job, unpack(ARGV, 13))
local function tell()
  return redis.pcall('XADD', results, 'MAXLEN', '10', '*', 'type', ARGV[7], 'worker_name', '', 'exc_string', ARGV[8])
end
if type(tell()) == 'table' then -- an error: it is no stream, or a stream that takes no more
  redis.call('DEL', results)
  tell()
end
if ttl_s < 0 then
  redis.call('PERSIST', job)
  redis.pcall('ZADD', failed, ttl_s, job_id)
else
  redis.call('EXPIRE', job, ttl_s)
  redis.call('EXPIRE', results, ttl_s)
  redis.pcall('ZADD', failed, tonumber(ARGV[10]) + ttl_s, job_id)
end
return 1
