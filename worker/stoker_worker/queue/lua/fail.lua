-- After holds.lua, count.lua and run.lua. Fails a job that waits, with the commands given, for the holder of the lease
-- only. KEYS, after those of `holds`: the queue, the job. ARGV, after those of `holds`: the id, the commands.
-- The reply: -1: it is not in the queue; 0: no job of this id waits.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return -1 end
if redis.call('LREM', KEYS[3], 1, ARGV[4]) == 0 then return -1 end
local status = redis.pcall('HGET', KEYS[4], 'status') -- an error if the key is no hash
local is_over = status == 'finished' or status == 'failed' or status == 'stopped' or status == 'canceled'
if type(status) == 'table' or is_over or redis.call('EXISTS', KEYS[4]) == 0 then return 0 end
run(ARGV, 5)
return 1
