-- Takes a member's lease, and the queues of its worker. KEYS: lease, fence, members, how often each member renewed its
-- lease; then, unless the lease is taken to put a dead member's jobs back, for each queue `SERVED_KEY` and `STORE_KEY`.
--
-- ARGV: the lifetime in milliseconds, the member, its description, the values for `SERVED_KEY` and `STORE_KEY`; whether
-- `STORE_KEY` is checked first, whether it is written, and the values that are no obstacle, because their workers are
-- certainly gone, or because this store may replace that one.
--
-- The reply: `taken`, the lease's value, its fencing number, the member's record before. Or the obstacle, its value,
-- for how many milliseconds, and the index of the queue: `held`: the lease; `served`: a `SERVED_KEY`; `kept`: a
-- `STORE_KEY`.
--
-- Like each script of the lease, it compares what is stored with what the caller expects, so that no step acts on an
-- old reading. A worker that is refused gets no number: that would depose the holder. A member that joins is in the set
-- of members from the moment in which it holds its lease; after a crash, as it was before, until its jobs are put back.
local ttl_ms, me, mine, share, kept = unpack(ARGV, 1, 5)
local store_first, first, passed = ARGV[6] == '1', 5, {}
for i = 8, #ARGV do passed[ARGV[i]] = true end
local function kept_elsewhere()
  for i = first, #KEYS, 2 do
    local found = redis.call('GET', KEYS[i + 1])
    if found and found ~= kept and not passed[found] then return {'kept', found, 0, (i - first) / 2} end
  end
end
local function served_by_others()
  for i = first, #KEYS, 2 do
    local found = redis.call('GET', KEYS[i])
    if found and found ~= share and not passed[found] then
      return {'served', found, redis.call('PTTL', KEYS[i]), (i - first) / 2}
    end
  end
end
local held = redis.call('GET', KEYS[1])
local refused = store_first and kept_elsewhere()
  or held and not passed[held] and {'held', held, redis.call('PTTL', KEYS[1]), 0}
  or served_by_others() or kept_elsewhere()
if refused then return refused end
local fence = redis.call('INCRBY', KEYS[2], 1)
redis.call('PERSIST', KEYS[2])
local value = '{"fence": ' .. fence .. ', ' .. string.sub(mine, 2)
local before = redis.call('HGET', KEYS[3], me) or ''
redis.call('SET', KEYS[1], value, 'PX', ttl_ms)
if before == '' and #KEYS > 4 then redis.call('HSET', KEYS[3], me, value) end
for i = first, #KEYS, 2 do
  redis.call('SET', KEYS[i], share, 'PX', ttl_ms)
  if ARGV[7] == '1' then redis.call('SET', KEYS[i + 1], kept) end
end
return {'taken', value, fence, before}
