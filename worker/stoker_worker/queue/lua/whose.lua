-- After holds.lua. Whose a run is. Every end removes the execution's hash together with its entry in the registry of
-- started jobs, in one transaction. When this worker writes the end, a note takes its place, which is then the reply.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 'lost' end
if redis.call('EXISTS', KEYS[4]) == 0 then return redis.call('HGET', KEYS[5], ARGV[4]) or 'lost' end
local status = redis.pcall('HGET', KEYS[3], 'status') -- of a key that is no hash: an error, which is no status
if status == 'started' then
  if ARGV[5] ~= '' then redis.call('HSET', KEYS[3], ARGV[5], redis.call('HGET', KEYS[3], 'created_at') or '-') end
  return 'ours'
end
return status == 'queued' and 'enqueued' or 'lost'
