-- KEYS: queue, this member's claimed ids, its lease, members, taken ids, counts, the operator's suspension, then `held`
-- and then `last` of all of this worker's queues. ARGV: lease's value, member, queue, how many to claim at most; then
-- for each id the end from which it is looked for (walking past 50,000 others takes the server a millisecond), the id,
-- and its use: empty for a job without an agent, else `w` or `r`, `1` if this worker's patience with the job is over,
-- else `0`, and the agent.
--
-- An id is moved as a whole: after a crash it is always in the queue or among the claimed ids. For each id, until so
-- many are claimed, the reply has three words: the verdict, the worker that made its agent's newest version, and that
-- version's number. `claimed`: it is ours. `held`, `stale`: as in `placement.lua`. `passed`: it is left to that worker
-- for a while. `gone`: it is not in the queue.
if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('EXISTS', KEYS[7]) == 1 then return false end
local member, queue, held, last = ARGV[2], ARGV[3], {}, {}
local n_queues = (#KEYS - 7) / 2
for i = 1, n_queues do held[i], last[i] = KEYS[7 + i], KEYS[7 + n_queues + i] end
local is_shared = redis.call('HLEN', KEYS[4]) > 1

local function decide(id, agent, mode, is_impatient)
  local barred = bar(held, queue, agent, mode, id)
  if barred then return barred, '', 0 end
  local maker, number = last_of(last, agent)
  local maker_name = member_of(maker)
  if maker_name ~= member and not is_impatient and is_ready(KEYS[4], maker_name, queue) then
    return 'passed', maker, number
  end
  return 'claimed', maker, number
end

local found, n_claimed = {}, 0
for i = 5, #ARGV, 3 do
  if n_claimed == tonumber(ARGV[4]) then break end
  local id, mode, agent = ARGV[i + 1], string.sub(ARGV[i + 2], 1, 1), string.sub(ARGV[i + 2], 3)
  local verdict, maker, number = 'claimed', '', 0
  if mode ~= '' then verdict, maker, number = decide(id, agent, mode, string.sub(ARGV[i + 2], 2, 2) == '1') end
  if verdict == 'claimed' then
    if redis.call('LREM', KEYS[1], ARGV[i], id) == 1 then
      redis.call('RPUSH', KEYS[2], id)
      n_claimed = n_claimed + 1
      if mode ~= '' then hold(held, queue, member, agent, mode, id) end
      if is_shared then
        redis.call('RPUSH', KEYS[5], id)
        redis.call('HINCRBY', KEYS[6], 'taken', 1)
      end
    else
      verdict = 'gone'
    end
  end
  for _, word in ipairs({verdict, maker, string.format('%d', number)}) do found[#found + 1] = word end
end
if is_shared then redis.call('LTRIM', KEYS[5], -2000, -1) end
return found
