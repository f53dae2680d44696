-- Puts a job that waited elsewhere into its queue, as RQ does. False if the queue's key is of another type.
local function enqueue(id, queue, enqueued_at)
  local job = 'rq:job:' .. id
  local f = redis.call('HMGET', job, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at', 'ttl')
  local front = f[1] == '1' or (f[2] == '1' and f[3] and f[3] ~= '')
  if type(redis.pcall(front and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)) == 'table' then return false end
  redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
  redis.call('HSET', job, 'status', 'queued', 'origin', queue, 'enqueued_at', enqueued_at)
  local ttl = tonumber(f[4] or '')
  if not ttl or ttl <= 0 then return true end
  local of_job = {job, job .. ':dependents', 'rq:job::' .. id .. ':dependencies'}
  for _, key in ipairs(of_job) do redis.pcall('EXPIRE', key, ttl) end
  return true
end
