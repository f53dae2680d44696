-- Puts a job that is in no list back into its queue, if it is still as it was read.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local job, queue, job_id = KEYS[2], KEYS[3], ARGV[2]
local now = redis.call('HMGET', job, 'status', 'enqueued_at', 'started_at')
for i = 1, 3 do if (now[i] or '') ~= ARGV[i + 2] then return 0 end end
if redis.call('LPOS', queue, job_id) or redis.call('LPOS', KEYS[4], job_id) then return 0 end
for i = 5, 7 do if redis.call('ZSCORE', KEYS[i], job_id) then return 0 end end
for _, member in ipairs(redis.call('ZRANGE', KEYS[8], 0, -1)) do
  if string.sub(member, 1, #job_id + 1) == job_id .. ':' then return 0 end
end
if now[1] == 'started' and redis.call('EXISTS', KEYS[9]) == 1 then return 0 end
for _, id in ipairs(redis.call('ZRANGE', KEYS[10], 0, -1)) do
  local worker = redis.call('HGET', ARGV[6] .. id, 'worker_name')
  for _, lease in ipairs(worker and redis.call('HVALS', KEYS[11]) or {}) do
    if lease ~= ARGV[1] and string.find(lease, '"' .. worker .. '"', 1, true) then return 0 end
  end
end
redis.call('HSET', job, 'status', 'queued')
redis.call('HDEL', job, 'worker_name')
redis.call('LPUSH', queue, job_id)
return 1
