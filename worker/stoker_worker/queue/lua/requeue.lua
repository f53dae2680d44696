-- After delivery.lua and rewritten.lua. Puts a job back at the front of its queue. A worker that lost its lease writes
-- nothing: the new holder puts its jobs back. Nothing is written either if the id is neither in the list in which RQ's
-- dequeue has left it, nor in the registry of started jobs: so the script may run twice, or after the job was finished,
-- canceled or deleted. From the third on, every loss counts as a loss alone, because a quarantined job runs alone.
if redis.call('GET', KEYS[8]) ~= ARGV[5] then return 'ended' end
local queue, left_in, job, execution, wip, of_job, of_worker = unpack(KEYS, 1, 7)
local job_id, member, execution_id, origin = unpack(ARGV, 1, 4)
local counts, alone, was_left, losses, losses_alone, its_delivery = unpack(ARGV, 6, 11)
local left = was_left == '1' and redis.call('LREM', left_in, 1, job_id) or 0
local started = member ~= '' and redis.call('ZSCORE', wip, member)
local status = redis.pcall('HGET', job, 'status') -- an error, which is no status, if the key is no hash
if left == 0 and not started then
  return status == 'queued' and redis.call('LPOS', queue, job_id) and 'waits' or 'ended'
end
local is_written = is_rewritten(job, job_id, status)
local runs = status == 'started' or is_written
if started and is_written then -- its id was enqueued again while it ran
  local named = 'rq:queue:' .. (redis.call('HGET', job, 'origin') or '')
  local waits = type(redis.pcall('LPOS', named, job_id)) == 'number' -- any key of a job may have any type
  local ran = redis.call('HGET', execution, its_delivery)
  if waits and ran and ran ~= delivery(job) then
    runs = false -- another delivery, which keeps its own place
    redis.call('HDEL', job, losses, losses_alone)
  else
    redis.pcall('LREM', named, 0, job_id)
    redis.call('LREM', queue, 0, job_id)
    redis.call('HSET', job, 'origin', origin)
  end
end
local function count(field)
  local before = string.match(redis.call('HGET', job, field) or '', '^%d+$') -- anybody can write it: minus a million
  local n = ((before and #before < 10 and tonumber(before)) or 0) + 1
  redis.call('HSET', job, field, n)
  return n
end
if runs and started and counts == '1' and (count(losses) > 2 or alone == '1') then count(losses_alone) end
if started then
  redis.call('ZREM', wip, member)
  redis.call('DEL', execution)
  redis.pcall('ZREM', of_job, execution_id)
  redis.call('SREM', of_worker, member)
end
if not runs then return 'ended' end
redis.call('HSET', job, 'status', 'queued')
redis.call('HDEL', job, 'worker_name')
redis.call('LPUSH', queue, job_id)
return 'requeued'
