-- The stamp of a job's hash as it is now: `delivery_stamp` in Python.
local function delivery(job)
  local f = redis.call('HMGET', job, 'created_at', 'data')
  return redis.sha1hex((f[1] or '') .. '\0' .. (f[2] or ''))
end
