-- Removes the ids of jobs that are gone from some of the canceled ones, in one step: an id may be used again, and
-- canceled again. Any producer can write a key of another type.
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then return end
for _, job_id in ipairs(redis.call('ZRANDMEMBER', KEYS[1], ARGV[1])) do
  if redis.call('EXISTS', ARGV[2] .. job_id) == 0 then redis.call('ZREM', KEYS[1], job_id) end
end
