-- KEYS: queue, taken ids, counts, the operator's suspension. ARGV: page, most new ids at the front, the `taken` that was seen, number of known
-- first ids, those (the first one first), known last ids (the last one first). Somebody else may have taken a known id
-- away; the next known one serves as well. The reply: length, which of the first ids it goes on from (0: none, so the
-- queue has to be read anew), the ids before that one, the ids behind the last one, the ids that were taken since, and
-- how many were ever taken, and whether the workers are suspended.
local queue, page, firsts = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[4])
local n_taken, is_taken = tonumber(redis.call('HGET', KEYS[3], 'taken') or '0'), {}
local n_new = n_taken - tonumber(ARGV[3])
local taken = n_new > 0 and redis.call('LRANGE', KEYS[2], -n_new, -1) or {}
for _, id in ipairs(taken) do is_taken[id] = true end
local function find(from, to, rank)
  for i = from, to do
    local at = not is_taken[ARGV[i]] and redis.call('LPOS', queue, ARGV[i], 'RANK', rank)
    if at then return at, i - 4 end
  end
  return -1, 0
end
local length, suspended = redis.call('LLEN', queue), redis.call('EXISTS', KEYS[4])
local front, anchor = find(5, 4 + firsts, 1)
local back = find(5 + firsts, #ARGV, -1)
if front < 0 or back < 0 or front > tonumber(ARGV[2]) or n_new < 0 or n_new > #taken then
  return {length, 0, {}, redis.call('LRANGE', queue, 0, page - 1), taken, n_taken, suspended}
end
local before = front > 0 and redis.call('LRANGE', queue, 0, front - 1) or {}
return {length, anchor, before, redis.call('LRANGE', queue, back + 1, back + page), taken, n_taken, suspended}
