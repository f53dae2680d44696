-- Counts a verdict, as `Counts.parsed` and `Counts.after` do. A count that cannot be read is zero.
local function count(counts, field, accepted, kept, most_pairs)
  local found = redis.pcall('HGET', counts, field)
  if not found and redis.call('HLEN', counts) >= tonumber(most_pairs) then return end
  local yes, no = string.match(type(found) == 'string' and found or '', '^([%d.]+) ([%d.]+)$')
  yes, no = (tonumber(yes) or 0) * kept + accepted, (tonumber(no) or 0) * kept + 1 - accepted
  redis.pcall('HSET', counts, field, string.format('%.4f %.4f', yes, no))
end
