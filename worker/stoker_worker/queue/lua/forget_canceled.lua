-- Removes the ids of jobs that are gone from a page of canceled jobs, in one step: an id may be used again, and
-- canceled again. Any producer can write a key of another type.
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then return {0, 0} end
local found, n_gone = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2]), 0
for _, job_id in ipairs(found) do
  if redis.call('EXISTS', ARGV[3] .. job_id) == 0 then n_gone = n_gone + redis.call('ZREM', KEYS[1], job_id) end
end
return {#found, n_gone}
