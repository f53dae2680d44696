-- Returns the values of some fields of a hash, and the memory that the hash takes. It can have gigabytes: a value that
-- would make the reply longer than `most_bytes` is replaced by its length. A smaller hash is read at once.
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
