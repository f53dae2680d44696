-- Returns whether a running job's hash, with this `status`, was written by an enqueuer. If it saved a copy of the job
-- from the time before the job was queued, the status is `scheduled` or `deferred`, and the id is in no such registry.
local function is_rewritten(job, id, status)
  if status ~= 'scheduled' and status ~= 'deferred' then return status == 'queued' end
  local registry = 'rq:' .. status .. ':' .. (redis.call('HGET', job, 'origin') or '')
  return type(redis.pcall('ZSCORE', registry, id)) ~= 'string'
end
