-- After holds.lua and delivery.lua. Whether a claimed job may start. 1: this worker still has the claim. 2: the same,
-- but a registry still holds the id from an earlier job. 0: it has not. -1: it was withdrawn since it was read; or its
-- batch is canceled, so this script canceled it; or its id was enqueued while it waits in another registry; or another
-- member runs this delivery. -2: it was enqueued anew since it was read. -3: another member runs another delivery of
-- its id.
local function is_in(registry, job_id) -- any producer can write a registry of another type, if there is none yet
  return type(redis.pcall('ZSCORE', registry, job_id)) == 'string'
end
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, job_id, stamp = KEYS[4], ARGV[4], ARGV[5]
if not redis.call('LPOS', KEYS[3], job_id) then return 0 end
local status = redis.call('HGET', job, 'status')
for i = 10, #ARGV do
  if status == ARGV[i] then return -1 end
end
if redis.call('EXISTS', job) == 0 then return -1 end
if status == 'scheduled' and is_in(KEYS[5], job_id) then return -1 end
if status == 'deferred' and is_in(KEYS[6], job_id) then return -1 end
if stamp ~= '' and stamp ~= delivery(job) then return -2 end
if KEYS[9] ~= 'stoker:batch:' and type(redis.pcall('HGET', KEYS[9], 'canceled')) == 'string' then
  redis.call('HSET', job, 'status', 'canceled')
  redis.pcall('ZADD', KEYS[10], redis.call('TIME')[1], job_id)
  if tonumber(ARGV[9]) > 0 then redis.pcall('EXPIRE', job, ARGV[9]) end
  return -1
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[7], 0, -1)) do
  local run = redis.call('HMGET', ARGV[8] .. id, 'worker_name', ARGV[6])
  if run[1] and run[1] ~= ARGV[7] then
    for _, member in ipairs(redis.call('HVALS', KEYS[8])) do
      if string.find(member, '"' .. run[1] .. '"', 1, true) then return run[2] == delivery(job) and -1 or -3 end
    end
  end
end
for i = 5, #KEYS do
  if (i < 7 or i > 10) and is_in(KEYS[i], job_id) then return 2 end
end
return 1
