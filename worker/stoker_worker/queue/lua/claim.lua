-- After placement.lua and fields.lua. Claims jobs and starts them: RQ's `dequeue`, `prepare_execution` and
-- `prepare_job_execution` in one step, so that a job either waits or is started.
--
-- KEYS: the queue, this member's lease, the operator's suspension. ARGV: the constant part, from `_about` in claim.py;
-- the lease's value; how many to claim at most; the time as RQ writes it, in seconds, and as executions have it. Then
-- for each job: the end from which LREM looks for it, 1 or -1 (50,000 ids take the server a millisecond); its id; its
-- use (empty without an agent, else `w` or `r`, `1` if this worker's patience with the job is over, else `0`, and the
-- agent); the id of its execution.
--
-- For each job, until so many are claimed, the reply has four parts: the verdict, the worker that made its agent's
-- newest version, that version's number, and the job's fields. `claimed`: it is ours. `held`: see placement.lua.
-- `passed`: it is left to that worker for a while. `gone`: it is not in the queue. `over`: no such job waits, or
-- another member runs this delivery; the id was dropped. `elsewhere`: another member runs another delivery of it.
-- `refused`: a key of another type is in the way.
local queue, it, limit, written_at, now, at = KEYS[1], cjson.decode(ARGV[1]), tonumber(ARGV[3]), unpack(ARGV, 4, 6)
local lease, suspended = unpack(redis.call('MGET', KEYS[2], KEYS[3]))
if lease ~= ARGV[2] or suspended then return false end
local room, n_claimed, found = it.most_bytes, 0, {}
local is_over = {finished = true, failed = true, stopped = true, canceled = true}

local function decide(id, agent, mode, is_impatient)
  if is_held(it.held, it.queue, agent, mode, id) then return 'held', '', 0 end
  local maker, number = last_of(it.last, agent)
  local maker_name = member_of(maker)
  if maker_name ~= it.member and not is_impatient and is_ready(it.members, maker_name, it.queue) then
    return 'passed', maker, number
  end
  return 'claimed', maker, number
end

local function is_of_type(fault)
  return string.find(type(fault) == 'table' and fault.err or fault, 'WRONGTYPE', 1, true) ~= nil
end

local function is_in(registry, id) -- any producer can write a registry of another type, if there is none yet
  return type(redis.pcall('ZSCORE', registry, id)) == 'string'
end

local function is_canceled(job, id, f)
  local batch = f[it.saving] ~= (f.created_at or '-') and type(f[it.batch]) == 'string' and f[it.batch] or ''
  if batch == '' or type(redis.pcall('HGET', it.batches .. batch, 'canceled')) ~= 'string' then return false end
  local ttl_s = tonumber(f.failure_ttl or '') or it.failure_ttl
  redis.call('HSET', job, 'status', 'canceled')
  redis.pcall('ZADD', it.canceled, redis.call('TIME')[1], id)
  if ttl_s > 0 then redis.pcall('EXPIRE', job, ttl_s) end
  return true
end

-- Returns `over` if another member runs this delivery, `elsewhere` if it runs another one, which has to end first.
local function run_by_another(id, executions, delivery)
  for _, execution in ipairs(executions) do
    local run = redis.pcall('HMGET', it.execution .. id .. ':' .. execution, 'worker_name', it.delivery)
    for _, member in ipairs(run[1] and run[1] ~= it.worker and redis.call('HVALS', it.members) or {}) do
      if string.find(member, '"' .. run[1] .. '"', 1, true) then return run[2] == delivery and 'over' or 'elsewhere' end
    end
  end
end

local function start(id, from, execution_id)
  local job, executions_key, entry = it.jobs .. id, it.executions .. id, id .. ':' .. execution_id
  local is_hash, values, size = pcall(fields_of, job, it.most_bytes, it.fields)
  if not is_hash and not is_of_type(values) then fields_of(job, it.most_bytes, it.fields) end -- raises it
  local f, status, delivery = {}, nil, ''
  for n, name in ipairs(is_hash and it.fields or {}) do f[name] = values[n] or nil end
  status = f.status
  if not next(f) or is_over[status] or (status == 'scheduled' and is_in(it.scheduled, id))
    or (status == 'deferred' and is_in(it.deferred, id)) or is_canceled(job, id, f) then
    redis.call('LREM', queue, from, id)
    return 'over'
  end
  if size > room and n_claimed > 0 then return end -- its turn comes with the next claim
  local created_at, data = f.created_at or '', f.data or ''
  if type(created_at) == 'string' and type(data) == 'string' then delivery = redis.sha1hex(created_at .. '\0' .. data) end
  local executions = redis.pcall('ZRANGE', executions_key, 0, -1)
  if executions.err then
    if is_of_type(executions) then return 'refused' end
    redis.call('ZRANGE', executions_key, 0, -1)
  end
  local verdict = run_by_another(id, executions, delivery)
  if verdict then
    if verdict == 'over' then redis.call('LREM', queue, from, id) end
    return verdict
  end
  local added = redis.pcall('ZADD', it.started, now + it.ttl, entry)
  if type(added) == 'table' then
    if is_of_type(added) then return 'refused' end
    redis.call('ZADD', it.started, now + it.ttl, entry) -- raises why: no memory, no right
  end
  if redis.call('LREM', queue, from, id) == 0 then
    redis.call('ZREM', it.started, entry)
    return 'gone'
  end
  redis.call('ZADD', executions_key, now + it.ttl + 60, execution_id)
  redis.call('EXPIRE', executions_key, it.ttl + 60)
  redis.pcall('SADD', it.of_worker, entry) -- the heartbeat lets it expire
  local execution = it.execution .. entry
  redis.call('HSET', execution, 'id', execution_id, 'job_id', id, 'created_at', at, 'last_heartbeat', at,
    'worker_name', it.worker, it.delivery, delivery)
  redis.call('EXPIRE', execution, it.ttl)
  redis.call('HSET', job, 'status', 'started', 'worker_name', it.worker, 'started_at', written_at,
    'last_heartbeat', written_at)
  -- A hash without these fields is as its producer wrote it: it does not expire, and its id is in no registry.
  if f.ttl or f.ended_at then redis.call('PERSIST', job) end
  for _, registry in ipairs(f.ended_at and it.registries or {}) do redis.pcall('ZREM', registry, id) end
  room = room - size
  return 'claimed', values
end

for i = 7, #ARGV, 4 do
  if n_claimed == limit then break end
  local id, use, values = ARGV[i + 1], ARGV[i + 2], nil
  local mode, agent, verdict, maker, number = string.sub(use, 1, 1), string.sub(use, 3), 'claimed', '', 0
  if mode ~= '' then verdict, maker, number = decide(id, agent, mode, string.sub(use, 2, 2) == '1') end
  if verdict == 'claimed' then verdict, values = start(id, ARGV[i], ARGV[i + 3]) end
  if not verdict then break end
  if verdict == 'claimed' then
    n_claimed = n_claimed + 1
    if mode ~= '' then hold(it.held, it.queue, it.member, agent, mode, id) end
    if it.is_shared then
      redis.call('RPUSH', it.taken, id)
      redis.call('HINCRBY', it.counts, 'taken', 1)
    end
  end
  for _, word in ipairs({verdict, maker, string.format('%d', number), values or {}}) do found[#found + 1] = word end
end
if it.is_shared and n_claimed > 0 then redis.call('LTRIM', it.taken, -2000, -1) end
return found
