-- Part of the claim script and of sweep.lua. `keys` are the `held` hashes of a worker's queues.
--
-- An entry of `held` is a JSON list: `w` (one job, which writes) or `r` (jobs that read), then for each job its queue,
-- the member that claimed it, and its id. Only jobs that are still in flight count, so no entry has to be removed after
-- a crash, a cancel or a recovery.

local function held_in(key, agent)
  local is_json, found = pcall(cjson.decode, redis.call('HGET', key, agent) or '')
  if not is_json or type(found) ~= 'table' then return 'r', {} end
  local jobs = {}
  for i = 2, #found, 3 do
    local queue, member, id = found[i], found[i + 1], found[i + 2]
    if type(queue) == 'string' and type(member) == 'string' and type(id) == 'string' then
      jobs[#jobs + 1] = {queue = queue, member = member, id = id}
    end
  end
  return found[1], jobs
end

local function state_of(job)
  local status = redis.pcall('HGET', 'rq:job:' .. job.id, 'status') -- a table, if the key is no hash
  if status == 'started' then return 'in flight' end
  if status ~= 'queued' and status ~= 'scheduled' and status ~= 'deferred' then return 'over' end
  if redis.call('EXISTS', 'rq:executions:' .. job.id) == 1 then return 'in flight' end -- enqueued while it runs
  return status == 'queued' and 'waits' or 'over'
end

-- Returns whether a job that was put back is in front of another one. Such a job is near the front.
local function is_before(queue, first, second)
  local list = 'rq:queue:' .. queue
  local at = redis.call('LPOS', list, first, 'MAXLEN', 1000)
  return at and (at == 0 or not redis.call('LPOS', list, second, 'MAXLEN', at))
end

-- Returns whether a job has to wait: another one of its agent is in flight beside which it may not run, or was put back
-- in front of it.
local function is_held(keys, queue, agent, mode, id)
  for _, key in ipairs(keys) do
    local held_as, jobs = held_in(key, agent)
    for _, job in ipairs((held_as == 'w' or mode == 'w') and jobs or {}) do
      local state = job.id ~= id and state_of(job)
      if state == 'in flight' then return true end
      if state == 'waits' and job.queue == queue and is_before(queue, job.id, id) then return true end
    end
  end
  return false
end

local function hold(keys, queue, member, agent, mode, id)
  for _, key in ipairs(keys) do
    local entry = {mode, queue, member, id}
    local held_as, jobs = held_in(key, agent)
    for _, job in ipairs(mode == 'r' and held_as == 'r' and jobs or {}) do
      if job.id ~= id and state_of(job) ~= 'over' then
        for _, word in ipairs({job.queue, job.member, job.id}) do entry[#entry + 1] = word end
      end
    end
    redis.call('HSET', key, agent, cjson.encode(entry))
  end
end

-- The worker that made the agent's newest version, and the version's number; nothing if none is known. `keys` are the
-- `last` hashes of a worker's queues.
local function last_of(keys, agent)
  local maker, newest = '', 0
  for _, key in ipairs(keys) do
    local worker, number = string.match(redis.call('HGET', key, agent) or '', '^(%S+) (%d+)$')
    if worker and #number < 16 and tonumber(number) > newest then maker, newest = worker, tonumber(number) end
  end
  return maker, newest
end

-- Returns the member that an RQ worker is, or was. Its caches stay when it is started again.
local function member_of(worker)
  return string.match(worker, '^stoker%-(.+)%-%x+$')
end

-- Returns whether a member lives, has loaded its model, does not leave, and serves the queue.
local function is_ready(members, member, queue)
  if not member or redis.call('EXISTS', 'stoker:holder:' .. member) == 0 then return false end
  local is_json, record = pcall(cjson.decode, redis.call('HGET', members, member) or '')
  if not is_json or type(record) ~= 'table' then return false end
  if record.loading ~= false or record.leaving == true or type(record.queues) ~= 'table' then return false end
  for _, served in ipairs(record.queues) do
    if served == queue then return true end
  end
  return false
end
