-- After placement.lua. Of a thousand random entries of `held`, removes those whose jobs are over; from a `last` that is
-- too long, removes random entries. KEYS: `held` and `last` of a queue. ARGV: the most entries of `last`.
for _, agent in ipairs(redis.call('HRANDFIELD', KEYS[1], 1000)) do
  local _, jobs = held_in(KEYS[1], agent)
  local is_over = true
  for _, job in ipairs(jobs) do is_over = is_over and state_of(job) == 'over' end
  if is_over then redis.call('HDEL', KEYS[1], agent) end
end
if redis.call('HLEN', KEYS[2]) > tonumber(ARGV[1]) then
  redis.call('HDEL', KEYS[2], unpack(redis.call('HRANDFIELD', KEYS[2], 5000)))
end
