-- After holds.lua. Removes the rest of a run. A job that is still shown as started is left alone: the member that
-- recovers it has to find it, to put it back. A job that was put back keeps its counts.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local member, id = ARGV[4], ARGV[5]
if redis.pcall('HGET', KEYS[3], 'status') == 'started' then return 0 end
local stood = redis.call('ZREM', KEYS[5], member) + redis.call('DEL', KEYS[4])
redis.pcall('ZREM', KEYS[6], id)
redis.call('SREM', KEYS[7], member)
if stood > 0 then redis.pcall('HDEL', KEYS[3], unpack(ARGV, 6)) end
return 1
