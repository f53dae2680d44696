-- After holds.lua, delivery.lua and rewritten.lua. After a running job was enqueued again: shows it as started in its
-- hash, and takes its id out of the queues.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, job_id = KEYS[3], ARGV[5]
if redis.call('EXISTS', KEYS[4]) == 0 then return 0 end
if not is_rewritten(job, job_id, redis.call('HGET', job, 'status')) then return 0 end
if delivery(job) ~= ARGV[6] then return 0 end
redis.call('HSET', job, 'status', 'started', 'origin', ARGV[7], 'worker_name', ARGV[8], 'started_at', ARGV[9])
redis.call('PERSIST', job)
for i = 5, #KEYS do redis.pcall('LREM', KEYS[i], 0, job_id) end -- any type
return 1
