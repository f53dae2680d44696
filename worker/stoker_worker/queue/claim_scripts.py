"""The scripts with which a worker reads ahead in a queue and claims from it. Owns their text and nothing else.

Each looks and acts in one step. They name the keys that they touch as KEYS, but for those of a job's agent, which are
fields, and those that `placement.lua` names.
"""

from typing import Final

from stoker_worker.placement.placement import FRAGMENT

# KEYS: queue, this member's claimed ids, its lease, members, taken ids, counts, then `held` and then `last` of all of
# this worker's queues. ARGV: lease's value, member, RQ worker, queue; then for each id the end from which it is looked
# for (walking past 50,000 others takes the server a millisecond), the id, and its use: empty for a job without an
# agent, else `w` or `r`, `1` if this worker's patience with the job is over, else `0`, and the agent.
#
# An id is moved as a whole: after a crash it is always in the queue or among the claimed ids. For each id the reply has
# three words: what became of it, then the worker that made its agent's newest version, and that version's number.
# `claimed`: it is ours. `held`, `stale`: as in `placement.lua`. `passed`: it is left to that worker for a while.
# `gone`: it is not in the queue.
CLAIM: Final = (
    FRAGMENT
    + """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return false end
local member, me, queue, held, last = ARGV[2], ARGV[3], ARGV[4], {}, {}
local n_queues = (#KEYS - 6) / 2
for i = 1, n_queues do held[i], last[i] = KEYS[6 + i], KEYS[6 + n_queues + i] end
local is_shared = redis.call('HLEN', KEYS[4]) > 1

local function decide(id, agent, mode, is_impatient)
  local barred = bar(held, queue, agent, mode, id)
  if barred then return barred, '', 0 end
  local maker, number = last_of(last, agent)
  if maker ~= '' and maker ~= me and not is_impatient and is_ready(KEYS[4], maker) then
    return 'passed', maker, number
  end
  return 'claimed', maker, number
end

local found = {}
for i = 5, #ARGV, 3 do
  local id, mode, agent = ARGV[i + 1], string.sub(ARGV[i + 2], 1, 1), string.sub(ARGV[i + 2], 3)
  local verdict, maker, number = 'claimed', '', 0
  if mode ~= '' then verdict, maker, number = decide(id, agent, mode, string.sub(ARGV[i + 2], 2, 2) == '1') end
  if verdict == 'claimed' then
    if redis.call('LREM', KEYS[1], ARGV[i], id) == 1 then
      redis.call('RPUSH', KEYS[2], id)
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
"""
)

# KEYS: jobs. ARGV: names of two fields, most bytes. For each job its producer's note of how it uses memory, or its
# whole data where there is no such note of this `created_at`; no more jobs once that data is over ARGV[3] bytes. And
# which of them are quarantined. A key that is no hash is one unreadable job, not a failure of the script.
READ: Final = """
local notes, with_data, quarantined, room = {}, {}, {}, tonumber(ARGV[3])
for n, job in ipairs(KEYS) do
  local fields = redis.pcall('HMGET', job, ARGV[1], ARGV[2], 'created_at')
  if fields.err then fields = {false, false, false} end
  local note, stamp = fields[1] or '', (fields[3] or '') .. ' '
  note = #note <= 10000 and string.sub(note, 1, #stamp) == stamp and string.sub(note, #stamp + 1) or ''
  local word = string.match(note, '^(%l+) .')
  if note ~= 'none' and word ~= 'write' and word ~= 'read' and word ~= 'append' and word ~= 'ask' then
    local length = redis.pcall('HSTRLEN', job, 'data')
    if type(length) ~= 'number' or length > tonumber(ARGV[4]) then length = 0 end -- refused at its turn
    if length > room and n > 1 then break end
    note, room = length > 0 and redis.call('HGET', job, 'data') or '', room - length
    with_data[#with_data + 1] = n
  end
  notes[n] = note
  local count = fields[2] -- as in `as_count`
  if count and #count < 10 and string.find(count, '^%d+$') and tonumber(count) > 0 then
    quarantined[#quarantined + 1] = n
  end
end
return {notes, with_data, quarantined}
"""

# KEYS: queue, taken ids, counts. ARGV: page, most new ids at the front, the `taken` that was seen, number of known
# first ids, those (the first one first), known last ids (the last one first). Somebody else may have taken a known id
# away; the next known one serves as well. The reply: length, which of the first ids it goes on from (0: none, so the
# queue has to be read anew), the ids before that one, the ids behind the last one, the ids that were taken since, and
# how many were ever taken.
LOOK: Final = """
local queue, page, firsts = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[4])
local n_taken, is_taken = tonumber(redis.call('HGET', KEYS[3], 'taken') or '0'), {}
local n_new = n_taken - tonumber(ARGV[3])
local taken = n_new > 0 and redis.call('LRANGE', KEYS[2], -n_new, -1) or {}
for _, id in ipairs(taken) do is_taken[id] = true end
local function find(from, to, rank)
  for i = from, to do
    local at = not is_taken[ARGV[i]] and redis.call('LPOS', queue, ARGV[i], 'RANK', rank)
    if at then return at, i - 4 end
  end
  return -1, 0
end
local length = redis.call('LLEN', queue)
local front, anchor = find(5, 4 + firsts, 1)
local back = find(5 + firsts, #ARGV, -1)
if front < 0 or back < 0 or front > tonumber(ARGV[2]) or n_new < 0 or n_new > #taken then
  return {length, 0, {}, redis.call('LRANGE', queue, 0, page - 1), taken, n_taken}
end
local before = front > 0 and redis.call('LRANGE', queue, 0, front - 1) or {}
return {length, anchor, before, redis.call('LRANGE', queue, back + 1, back + page), taken, n_taken}
"""
