-- KEYS: `held` and `last` of a queue. ARGV: most entries of `last`. Of a thousand entries of `held`, removes those of which
-- no job is in flight or waits, and from a `last` that is too long any.
for _, agent in ipairs(redis.call('HRANDFIELD', KEYS[1], 1000)) do
  local _, jobs = held_in(KEYS[1], agent)
  local is_over = true
  for _, job in ipairs(jobs) do is_over = is_over and state_of(job) == 'over' end
  if is_over then redis.call('HDEL', KEYS[1], agent) end
end
if redis.call('HLEN', KEYS[2]) > tonumber(ARGV[1]) then
  redis.call('HDEL', KEYS[2], unpack(redis.call('HRANDFIELD', KEYS[2], 5000)))
end
