-- The values of some fields of a hash, which can have gigabytes: in place of each value that would make the reply
-- longer than ARGV[1] bytes there is its length. A hash that takes less memory than that needs no look at each field.
if (redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 0) or 0) <= tonumber(ARGV[1]) then
  return redis.call('HMGET', KEYS[1], unpack(ARGV, 2))
end
local values, room = {}, tonumber(ARGV[1])
for i = 2, #ARGV do
  local length = redis.call('HSTRLEN', KEYS[1], ARGV[i])
  if length > room then
    values[i - 1] = length
  else
    values[i - 1] = redis.call('HGET', KEYS[1], ARGV[i])
    room = room - length
  end
end
return values
