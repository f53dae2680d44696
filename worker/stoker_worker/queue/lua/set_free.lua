-- After enqueue.lua. Enqueues the jobs that waited for `parent` and may run now. `ended`: `finished` or `failed`. As
-- for RQ, a dependency that is not there any more is no obstacle. A job whose keys cannot be read stays deferred.
local function is_met(id, parent, ended, f)
  local may_fail = f[3] == '1'
  if ended == 'failed' and not may_fail then return false end
  local others = redis.pcall('SMEMBERS', 'rq:job::' .. id .. ':dependencies')
  for _, other in ipairs(others) do
    local status = other ~= parent and redis.pcall('HGET', 'rq:job:' .. other, 'status')
    if status and status ~= 'finished' and not (may_fail and status == 'failed') then return false end
  end
  return not others.err and string.find(f[4] or '', '"' .. parent .. '"', 1, true) ~= nil
end

local function set_free(waiting, dependents, parent, ended, now)
  for _, id in ipairs(dependents) do
    local job = 'rq:job:' .. id
    local fields = {'status', 'origin', 'allow_dependency_failures', 'dependency_ids', 'rate_limit_key'}
    local f = redis.pcall('HMGET', job, unpack(fields))
    local waits = f[2] and (f[1] == 'deferred' or f[1] == 'ready_to_enqueue') and string.find(id, '^[%w_-]+$')
    if waits and is_met(id, parent, ended, f) then
      local is_limited = f[5] and f[5] ~= ''
      if is_limited then -- a worker of RQ's own keeps the limit
        redis.call('HSET', job, 'status', 'ready_to_enqueue')
        redis.pcall('ZADD', 'rq:ready:' .. f[2], redis.call('TIME')[1], id)
      end
      if is_limited or enqueue(id, f[2], now) then
        if not is_limited then redis.pcall('ZREM', 'rq:ready:' .. f[2], id) end
        redis.pcall('ZREM', 'rq:deferred:' .. f[2], id)
        redis.pcall('SREM', waiting, id)
      end
    end
  end
end
