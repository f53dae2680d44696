-- Returns whether the lease is ours. One that ran out while Redis was away is taken again, with its queues, unless
-- another worker has held it since, or serves one of the queues: then our jobs in flight were that worker's to recover,
-- even if it has left. A server that has lost its data has no fencing number, or that of an earlier holder, perhaps
-- with that holder's lease. Called with `Lease.keys` and `Lease.args`.
local function holds(lease, fence, mine, number, ttl_ms)
  local held = redis.call('GET', lease)
  if held == mine then return true end
  local last, most = redis.call('GET', fence) or '0', tonumber(number)
  if held then last, most = string.match(held, '"fence": (%d+)') or '', most - 1 end
  if (tonumber(last) or math.huge) > most then return false end
  local me, share = cjson.decode(mine), 'only ' .. string.sub(lease, #'stoker:holder:' + 1)
  if me.shared ~= '' then share = 'shared ' .. me.shared .. ' ' .. me.model end
  local queues = me.recovers and {} or me.queues
  for _, queue in ipairs(queues) do
    if (redis.call('GET', 'stoker:lease:' .. queue) or share) ~= share then return false end
  end
  for _, queue in ipairs(queues) do redis.call('SET', 'stoker:lease:' .. queue, share, 'PX', ttl_ms) end
  redis.call('SET', fence, number)
  redis.call('SET', lease, mine, 'PX', ttl_ms)
  return true
end
