-- After holds.lua and delivery.lua. Starts a claimed job: RQ's `prepare_execution` and `prepare_job_execution` in one
-- step, while the claim is ours. KEYS, after those of `holds`: the claimed ids, the job, the registries of scheduled and
-- deferred jobs, the members, the job's batch, the registry of canceled jobs, the new execution, the job's executions,
-- the started ones, the worker's; then every registry that may hold the id from an earlier job, which RQ does not
-- remove there. ARGV, after those of `holds`: the id, its stamp as it was read, `FIELD_DELIVERY`, how long a job whose
-- batch is canceled is kept, the keys of the job's executions without their ids, how long the execution is kept, the
-- time as RQ writes it, and in seconds; the execution's id, its worker, its fields.
--
-- The reply: 1: it is started. 0: this worker does not have the claim. -1: it was withdrawn since it was read; or its
-- batch is canceled, so this script canceled it; or its id was enqueued while it waits in another registry; or another
-- member runs this delivery. -2: it was enqueued anew since it was read. -3: another member runs another delivery of
-- its id.
local claimed, job, scheduled, deferred, members, batch, canceled = unpack(KEYS, 3, 9)
local execution, executions, started, of_worker = unpack(KEYS, 10, 13)
local job_id, stamp, field, failure_ttl_s, prefix, ttl_s, written_at, now, execution_id, worker = unpack(ARGV, 4, 13)
local function is_in(registry) -- any producer can write a registry of another type, if there is none yet
  return type(redis.pcall('ZSCORE', registry, job_id)) == 'string'
end
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
if not redis.call('LPOS', claimed, job_id) then return 0 end
local status = redis.call('HGET', job, 'status')
if status == 'finished' or status == 'failed' or status == 'stopped' or status == 'canceled' then return -1 end
if redis.call('EXISTS', job) == 0 then return -1 end
if status == 'scheduled' and is_in(scheduled) or status == 'deferred' and is_in(deferred) then return -1 end
if stamp ~= '' and stamp ~= delivery(job) then return -2 end
if batch ~= 'stoker:batch:' and type(redis.pcall('HGET', batch, 'canceled')) == 'string' then
  redis.call('HSET', job, 'status', 'canceled')
  redis.pcall('ZADD', canceled, redis.call('TIME')[1], job_id)
  if tonumber(failure_ttl_s) > 0 then redis.pcall('EXPIRE', job, failure_ttl_s) end
  return -1
end
for _, id in ipairs(redis.call('ZRANGE', executions, 0, -1)) do
  local run = redis.call('HMGET', prefix .. id, 'worker_name', field)
  if run[1] and run[1] ~= worker then
    for _, member in ipairs(redis.call('HVALS', members)) do
      if string.find(member, '"' .. run[1] .. '"', 1, true) then return run[2] == delivery(job) and -1 or -3 end
    end
  end
end
local longer_s = tonumber(ttl_s) + 60
redis.call('ZADD', executions, now + longer_s, execution_id) -- first what may be refused, because of what is there
redis.call('EXPIRE', executions, longer_s)
redis.call('ZADD', started, now + ttl_s, job_id .. ':' .. execution_id)
redis.call('SADD', of_worker, job_id .. ':' .. execution_id)
redis.call('EXPIRE', of_worker, longer_s)
redis.call('HSET', execution, unpack(ARGV, 14))
if stamp ~= '' then redis.call('HSET', execution, field, stamp) end
redis.call('EXPIRE', execution, ttl_s)
redis.call('HSET', job, 'status', 'started', 'worker_name', worker, 'started_at', written_at,
  'last_heartbeat', written_at)
redis.call('PERSIST', job)
for i = 14, #KEYS do redis.pcall('ZREM', KEYS[i], job_id) end
redis.call('LREM', claimed, 1, job_id)
return 1
