-- KEYS: `held` and `last` of a queue. ARGV: where to go on in each, most entries of `last`. Removes entries of `held`
-- of which no job is in flight or waits, and from a `last` that is too long any. Returns where to go on.
local function page(key, cursor)
  local reply = redis.call('HSCAN', key, cursor, 'COUNT', 200)
  return reply[1], reply[2]
end
local next_held, held = page(KEYS[1], ARGV[1])
for i = 1, #held, 2 do
  local _, jobs = held_in(KEYS[1], held[i])
  local is_over = true
  for _, job in ipairs(jobs) do is_over = is_over and state_of(job) == 'over' end
  if is_over then redis.call('HDEL', KEYS[1], held[i]) end
end
local next_last, n_over = '0', redis.call('HLEN', KEYS[2]) - tonumber(ARGV[3])
if n_over > 0 then
  local last
  next_last, last = page(KEYS[2], ARGV[2])
  for i = 1, math.min(#last, 2 * n_over), 2 do redis.call('HDEL', KEYS[2], last[i]) end
end
return {next_held, next_last}
