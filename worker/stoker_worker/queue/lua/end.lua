-- After holds.lua, count.lua, run.lua, enqueue.lua, set_free.lua and rewritten.lua. Checks whether a run is ours. If it
-- is, ends it with the commands given and enqueues the jobs that waited for this end. Every end removes the execution's
-- hash and its entry in the registry of started jobs, so there can be only one.
--
-- KEYS, after those of `holds`: the job, the execution, those that wait for the job. ARGV, after those of `holds`: the
-- job's id, its worker, when it started; a field that is written if the run is ours, or nothing; `meta` as the commands
-- expect it, and its greatest length; `finished` or `failed` to enqueue the jobs that waited for such an end, or
-- nothing; the lifetime of the set of those that still wait, or nothing; the time as RQ writes it; the commands.
--
-- The reply: `ours` without commands; `ended`: by this call or an earlier one; `lost`; `enqueued`: the job was enqueued
-- again meanwhile; or `meta` as it is now, if it is not as expected.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 'lost' end
local job, execution, waiting = unpack(KEYS, 3, 5)
local id, worker, started_at, field, meta, most_bytes, ended, ttl_s, now = unpack(ARGV, 4, 12)
local found = redis.pcall('HMGET', job, 'status', 'meta', 'created_at', 'worker_name', 'started_at')
local status, meta_now = found[1], found[2] or '' -- if the key is no hash, `found` is an error without these
if redis.call('EXISTS', execution) == 0 then
  local was_ours = found[4] == worker and found[5] == started_at -- a job that was put back has no worker
  return was_ours and status ~= 'started' and status ~= 'canceled' and 'ended' or 'lost'
end
if status ~= 'started' then return is_rewritten(job, id, status) and 'enqueued' or 'lost' end
if field ~= '' then redis.call('HSET', job, field, found[3] or '-') end
if #ARGV < 13 then return 'ours' end
-- A longer one was not read by the claim either.
if meta_now ~= meta and #meta_now <= tonumber(most_bytes) then return {'meta', meta_now} end
local dependents = ended ~= '' and redis.pcall('SMEMBERS', waiting) or {}
run(ARGV, 13)
set_free(waiting, dependents, id, ended, now)
if ttl_s ~= '' and #dependents > 0 then redis.call('EXPIRE', waiting, ttl_s) end
return 'ended'
