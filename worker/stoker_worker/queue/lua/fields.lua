-- The values of some fields of a hash, which can have gigabytes: in place of each value that would make the reply
-- longer than so many bytes there is its length. A hash that takes less memory than that needs no look at each field.
-- Also the memory that it takes.
local function fields_of(job, most_bytes, names)
  local size = redis.call('MEMORY', 'USAGE', job, 'SAMPLES', 0) or 0
  if size <= most_bytes then return redis.call('HMGET', job, unpack(names)), size end
  local values, room = {}, most_bytes
  for i, name in ipairs(names) do
    local length = redis.call('HSTRLEN', job, name)
    if length > room then
      values[i] = length
    else
      values[i] = redis.call('HGET', job, name)
      room = room - length
    end
  end
  return values, size
end
