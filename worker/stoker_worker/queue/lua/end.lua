-- After holds.lua and count.lua. Whose a run is; and if it is ours, ends it with the commands given. Every end removes
-- the execution's hash together with its entry in the registry of started jobs, so there is only one.
--
-- KEYS, after those of `holds`: the job, the execution, the notes of ends, those that wait for the job.
-- ARGV, after those of `holds`: the execution's entry among the started ones, its worker, when it started; a field that
-- is written if the run is ours, or nothing; `meta` as it has to be, and how long it is at most; the note without its end; whether it is written
-- even if nobody waits for the job; how long the set of those that wait is kept, or nothing; then, for each command, how
-- many words it has, and these. The first command may be refused, because of what a key holds, and then nothing has
-- changed. Later ones are as in a transaction.
--
-- The reply: `ours` without commands; `ended`; the note, if there is one; `finished`: this run has ended so, and left no
-- note; `lost`; `enqueued`: the hash was written anew; or `meta` as it is now.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 'lost' end
local job, execution, notes, waiting = unpack(KEYS, 3, 6)
local entry, worker, started_at, field, meta, most_bytes, note, is_noted, ttl_s = unpack(ARGV, 4, 12)
if redis.call('EXISTS', execution) == 0 then
  local found = redis.pcall('HMGET', job, 'status', 'worker_name', 'started_at')
  local is_finished = found[1] == 'finished' and found[2] == worker and found[3] == started_at
  return redis.call('HGET', notes, entry) or is_finished and 'finished' or 'lost'
end
local found = redis.pcall('HMGET', job, 'status', 'meta', 'created_at') -- of a key that is no hash: an error
if found[1] ~= 'started' then return found[1] == 'queued' and 'enqueued' or 'lost' end
if field ~= '' then redis.call('HSET', job, field, found[3] or '-') end
local at, call = 13, redis.call
if at > #ARGV then return 'ours' end
local meta_now, ids = found[2] or '', {}
-- A longer one was not read by the claim either.
if meta_now ~= meta and #meta_now <= tonumber(most_bytes) then return {'meta', meta_now} end
for _, id in ipairs(redis.pcall('SMEMBERS', waiting)) do
  if string.find(id, '^[%w_-]+$') then ids[#ids + 1] = id end -- RQ knows no others
end
while at <= #ARGV do
  local last = at + tonumber(ARGV[at])
  if ARGV[at + 1] == 'count' then
    count(unpack(ARGV, at + 2, last))
  else
    call(unpack(ARGV, at + 1, last))
  end
  at, call = last + 1, redis.pcall
end
if #ids > 0 and ttl_s ~= '' then redis.call('EXPIRE', waiting, ttl_s) end
if #ids == 0 and is_noted ~= '1' then return 'ended' end
note = note .. ', "dependents": ' .. (#ids > 0 and cjson.encode(ids) or '[]') .. '}'
redis.call('HSET', notes, entry, note)
return note
