-- Returns, for each job, its producer's note of how it uses memory, or its whole data if there is no such note of this
-- `created_at`, and ends early once there is too much data; then which jobs are given by their data, and which are
-- quarantined. A key that is no hash is one unreadable job, not a failure of the script. ARGV: the prefix of jobs'
-- keys, the names of two fields, the most bytes of all data, and of one job's.
local function read(ids)
  local notes, with_data, quarantined, room = {}, {}, {}, tonumber(ARGV[4])
  for n, id in ipairs(ids) do
    local job = ARGV[1] .. id
    local fields = redis.pcall('HMGET', job, ARGV[2], ARGV[3], 'created_at')
    if fields.err then fields = {false, false, false} end
    local note, stamp = fields[1] or '', (fields[3] or '') .. ' '
    note = #note <= 10000 and string.sub(note, 1, #stamp) == stamp and string.sub(note, #stamp + 1) or ''
    local word = string.match(note, '^(%l+) .')
    if note ~= 'none' and word ~= 'write' and word ~= 'read' then
      local length = redis.pcall('HSTRLEN', job, 'data')
      if type(length) ~= 'number' or length > tonumber(ARGV[5]) then length = 0 end -- refused at its turn
      if length > room and n > 1 then break end
      note, room = length > 0 and redis.call('HGET', job, 'data') or '', room - length
      with_data[#with_data + 1] = n
    end
    notes[n] = note
    local count = fields[2] -- as in `as_count`
    if count and #count < 10 and string.find(count, '^%d+$') and tonumber(count) > 1 then
      quarantined[#quarantined + 1] = n
    end
  end
  return {notes, with_data, quarantined}
end
