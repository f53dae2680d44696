-- Removes a member. KEYS: as in lease_take.lua. ARGV: the lease's value, the member, its value of `SERVED_KEY`, for how
-- many milliseconds its fencing number is kept, and the queues. After the last member of a queue, any other may serve
-- it.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('HDEL', KEYS[4], ARGV[2])
local is_served = {}
for _, record in ipairs(#KEYS > 4 and redis.call('HVALS', KEYS[3]) or {}) do
  local is_json, member = pcall(cjson.decode, record)
  if is_json and type(member) == 'table' and type(member.queues) == 'table' then
    for _, queue in ipairs(member.queues) do is_served[queue] = true end
  end
end
for i = 5, #KEYS, 2 do
  if not is_served[ARGV[(i + 5) / 2]] and redis.call('GET', KEYS[i]) == ARGV[3] then redis.call('DEL', KEYS[i]) end
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return redis.call('DEL', KEYS[1])
