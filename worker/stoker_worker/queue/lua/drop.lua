-- Takes an id out of a queue, if its job runs: a delivery that came meanwhile stays.
-- KEYS: the queue, the job. ARGV: the id.
if redis.call('HGET', KEYS[2], 'status') ~= 'started' then return 0 end
return redis.call('LREM', KEYS[1], 1, ARGV[1])
