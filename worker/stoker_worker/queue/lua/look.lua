-- After read.lua. KEYS: queue, taken ids, counts, the operator's suspension. ARGV, after those of `read`: page; the
-- most new ids at the front; the number of taken ids at the last look (empty if no other worker takes any); how many
-- new jobs are read at most; the number of known first ids; these ids, the first one first; known last ids, the last
-- one first. Another worker may have taken a known id: then the next known one serves. The reply: the length; the index
-- of the known first id that was found (0: none, so the queue has to be read anew); the ids before that one; the ids
-- behind the last known one; the ids taken since the last look; how many were ever taken; whether workers are
-- suspended; and what was read of the first new ids.
local queue, page, firsts = KEYS[1], tonumber(ARGV[6]), tonumber(ARGV[10])
local n_taken, is_taken = 0, {}
if ARGV[8] ~= '' then n_taken = tonumber(redis.call('HGET', KEYS[3], 'taken') or '0') end
local n_new = n_taken - (tonumber(ARGV[8]) or 0)
local taken = n_new > 0 and redis.call('LRANGE', KEYS[2], -n_new, -1) or {}
for _, id in ipairs(taken) do is_taken[id] = true end
local function find(from, to, rank)
  for i = from, to do
    local at = not is_taken[ARGV[i]] and redis.call('LPOS', queue, ARGV[i], 'RANK', rank)
    if at then return at, i - 10 end
  end
  return -1, 0
end
local length, suspended = redis.call('LLEN', queue), redis.call('EXISTS', KEYS[4])
local front, anchor = find(11, 10 + firsts, 1)
local back = find(11 + firsts, #ARGV, -1)
local before, behind = {}, nil
if front < 0 or back < 0 or front > tonumber(ARGV[7]) or n_new < 0 or n_new > #taken then
  anchor, behind = 0, length > 0 and redis.call('LRANGE', queue, 0, page - 1) or {}
else
  before = front > 0 and redis.call('LRANGE', queue, 0, front - 1) or {}
  behind = back < length - 1 and redis.call('LRANGE', queue, back + 1, back + page) or {}
end
local new = {}
for _, ids in ipairs({before, behind}) do
  for _, id in ipairs(ids) do if #new < tonumber(ARGV[9]) then new[#new + 1] = id end end
end
return {length, anchor, before, behind, taken, n_taken, suspended, read(new)}
