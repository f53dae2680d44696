-- After holds.lua, count.lua, run.lua, enqueue.lua and set_free.lua. Whose a run is; and if it is ours, ends it with
-- the commands given, and enqueues the jobs that waited for this end. Every end removes the execution's hash together
-- with its entry in the registry of started jobs, so there is only one.
--
-- KEYS, after those of `holds`: the job, the execution, those that wait for the job.
-- ARGV, after those of `holds`: the job's id, its worker, when it started; a field that is written if the run is ours,
-- or nothing; `meta` as it has to be, and how long it is at most; `finished` or `failed` if others waited for such an
-- end, or nothing; how long the set of those that wait on is kept, or nothing; the time as RQ writes it; the commands.
--
-- The reply: `ours` without commands; `ended`: by this call or by an earlier one; `lost`; `enqueued`: the hash was
-- written anew; or `meta` as it is now.
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 'lost' end
local job, execution, waiting = unpack(KEYS, 3, 5)
local id, worker, started_at, field, meta, most_bytes, ended, ttl_s, now = unpack(ARGV, 4, 12)
local found = redis.pcall('HMGET', job, 'status', 'meta', 'created_at', 'worker_name', 'started_at')
local status, meta_now = found[1], found[2] or '' -- of a key that is no hash: an error, without these
if redis.call('EXISTS', execution) == 0 then
  local was_ours = found[4] == worker and found[5] == started_at -- a job that was put back has no worker
  return was_ours and status ~= 'started' and status ~= 'canceled' and 'ended' or 'lost'
end
if status ~= 'started' then return status == 'queued' and 'enqueued' or 'lost' end
if field ~= '' then redis.call('HSET', job, field, found[3] or '-') end
if #ARGV < 13 then return 'ours' end
-- A longer one was not read by the claim either.
if meta_now ~= meta and #meta_now <= tonumber(most_bytes) then return {'meta', meta_now} end
local dependents = ended ~= '' and redis.pcall('SMEMBERS', waiting) or {}
run(ARGV, 13)
set_free(waiting, dependents, id, ended, now)
if ttl_s ~= '' and #dependents > 0 then redis.call('EXPIRE', waiting, ttl_s) end
return 'ended'
