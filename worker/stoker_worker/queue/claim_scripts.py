"""The scripts with which a worker reads ahead in a queue and claims from it. Owns their text and nothing else.

Each looks and acts in one step. They name the keys that they touch as KEYS, but for those of a job's agent, which are
fields.
"""

from typing import Final

from stoker_worker.queue.home_scripts import WORDS

# KEYS: queue, this member's claimed ids, its lease, members, stores of members that left, taken ids, counts, and the
# homes of all of this worker's queues, those of this queue first. ARGV: lease's value, member, its store, the `moves`
# that the look saw, how many seconds a job waits for a store that is away, whether memory travels between stores (`2`:
# not now); then for each id the end from which it is looked for (walking past 50,000 others takes the server a
# millisecond), the id, and its use: empty for a job without an agent, else `n` or `c` (it continues what is stored) and
# the agent.
#
# An id is moved as a whole: after a crash it is always in the queue or among the claimed ids. For each id the reply has
# four words: what became of it; where its agent's memory is; its agent's home before, empty if that is this worker,
# `-` if there was none or it is not known; the version of that memory, empty if none is noted. `claimed`: it is ours.
# `lost`: ours too, to be failed, because the memory is in a store that is away for too long, or whose worker does not
# serve this queue; the third word is that worker. `home`: another member's, the second word. `away`: that store may be
# back soon; the third word is for how many seconds the job waits for it. `stale`: agents were set free since the look,
# so jobs of this one may be in the queue that the look has not seen. `gone`: it is not in the queue.
CLAIM: Final = (
    WORDS
    + """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return false end
local me, store, wait_s, travels, first = ARGV[2], ARGV[3], tonumber(ARGV[5]), ARGV[6] == '1', 8
local has_moved = (redis.call('HGET', KEYS[7], 'moves') or '0') ~= ARGV[4]
local function enter(agent, entry)
  for i = first, #KEYS do redis.call('HSET', KEYS[i], agent, entry) end
end

local function member_with(kept)
  local all = redis.call('HGETALL', KEYS[4])
  for i = 1, #all, 2 do
    if string.find(all[i + 1], '"store": "' .. kept .. '"', 1, true) then return all[i], all[i + 1] end
  end
end

local function is_shared(kept)
  local its_member, record = member_with(kept)
  if its_member then return string.find(record, '"shared": "%x') end
  return string.find(redis.call('HGET', KEYS[5], kept) or '', ' shared$')
end

local function decide(id, agent, continues)
  local is_home, kept, former, version = true, '-', '', ''
  for i = first, #KEYS do
    local home, at, number, before = words(redis.call('HGET', KEYS[i], agent))
    if home ~= me then
      if home ~= '-' and home ~= '>' .. id and serves(KEYS[4], home, KEYS[i]) then
        local is_elsewhere = continues and not travels and at ~= '-' and at ~= store
        if is_elsewhere and not serves(KEYS[4], home, KEYS[first]) then return 'lost', at, home, number end
        return 'home', home, '', ''
      end
      is_home = false
      if home ~= '-' or at ~= '-' then former = home ~= '-' and home or at end
    end
    -- What another store has is newer than what is here: an end here is entered in all queues.
    if at ~= '-' and (kept == '-' or kept == store) then kept, version = at, number end
    if home == me and former == '' then former = before end
  end
  -- A version is noted where there is a shared store. Without one, the turn is in that store alone, unless its worker
  -- has got a shared store since.
  if continues and kept ~= '-' and kept ~= store and not (travels and (version ~= '' or is_shared(kept))) then
    if is_home then -- nothing of the agent is in flight here, or it would not have been chosen
      enter(agent, entry_of('-', kept, version))
      redis.call('HINCRBY', KEYS[7], 'moves', 1)
    end
    local its_member = member_with(kept)
    if its_member and serves(KEYS[4], its_member, KEYS[first]) then return 'home', its_member, '', '' end
    local left, who = string.match(redis.call('HGET', KEYS[5], kept) or '', '^(%d+) (%S+)')
    local left_s = left and wait_s - (redis.call('TIME')[1] - left) or 0
    if left_s > 0 then return redis.call('LPOS', KEYS[1], id) and 'away' or 'gone', kept, tostring(left_s), '' end
    return 'lost', kept, who or its_member or kept, version
  end
  if not is_home and has_moved then return 'stale', '', '', '' end
  local was_elsewhere = former ~= '' and former ~= me and former ~= store and string.sub(former, 1, 1) ~= '>'
  if not is_home and not was_elsewhere then former = '-' end
  return 'claimed', kept, former, version
end

local found, is_shared = {}, redis.call('HLEN', KEYS[4]) > 1
for i = 7, #ARGV, 3 do
  local where, id, use = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local verdict, kept, former, version = 'claimed', '', '', ''
  if use ~= '' then verdict, kept, former, version = decide(id, string.sub(use, 2), string.sub(use, 1, 1) == 'c') end
  if verdict == 'claimed' or verdict == 'lost' then
    if redis.call('LREM', KEYS[1], where, id) == 1 then
      redis.call('RPUSH', KEYS[2], id)
      if verdict == 'claimed' and former ~= '' then
        enter(string.sub(use, 2), entry_of(me, kept, version, ARGV[6] ~= '0' and former or ''))
      end
      if is_shared then
        redis.call('RPUSH', KEYS[6], id)
        redis.call('HINCRBY', KEYS[7], 'taken', 1)
      end
    else
      verdict = 'gone'
    end
  end
  for _, word in ipairs({verdict, kept, former, version}) do found[#found + 1] = word end
end
if is_shared then redis.call('LTRIM', KEYS[6], -2000, -1) end
return found
"""
)

# KEYS: members, this queue's homes, jobs. ARGV: member, names of two fields, most bytes, name of a field. For each job
# its producer's note of how it uses memory, or its whole data where there is no such note of this `created_at`; no more
# jobs once that data is over ARGV[4] bytes. For a job with a note also its agent's home, if that is another member. And
# which of them are quarantined, and the notes of what they need. A key that is no hash is one unreadable job, not a
# failure of the script.
READ: Final = (
    WORDS
    + """
local notes, with_data, quarantined, homes, needs, room = {}, {}, {}, {}, {}, tonumber(ARGV[4])
local agents, of_job, is_home = {}, {}, {}
local function of_this_job(note, created_at)
  local stamp = (created_at or '') .. ' '
  if not note or #note > 10000 or string.sub(note, 1, #stamp) ~= stamp then return '' end
  return string.sub(note, #stamp + 1)
end
for i = 3, #KEYS do
  local job, n = KEYS[i], i - 2
  local fields = redis.pcall('HMGET', job, ARGV[2], ARGV[3], 'created_at', ARGV[5])
  if fields.err then fields = {false, false, false, false} end
  local note = of_this_job(fields[1], fields[3])
  local word, agent = string.match(note, '^(%l+) (.+)$')
  if note ~= 'none' and word ~= 'write' and word ~= 'read' and word ~= 'append' and word ~= 'ask' then
    local length = redis.pcall('HSTRLEN', job, 'data')
    if type(length) ~= 'number' or length > tonumber(ARGV[6]) then length = 0 end -- refused at its turn
    if length > room and n > 1 then break end
    note, agent, room = length > 0 and redis.call('HGET', job, 'data') or '', nil, room - length
    with_data[#with_data + 1] = n
  end
  notes[n], homes[n], needs[n] = note, '', of_this_job(fields[4], fields[3])
  if agent then agents[#agents + 1], of_job[#of_job + 1] = agent, n end
  local count = fields[2] -- as in `as_count`
  if count and #count < 10 and string.find(count, '^%d+$') and tonumber(count) > 0 then
    quarantined[#quarantined + 1] = n
  end
end
local entries = #agents > 0 and redis.call('HMGET', KEYS[2], unpack(agents)) or {}
for i = 1, #agents do
  local home, job_id = words(entries[i]), string.sub(KEYS[of_job[i] + 2], #job_of + 1)
  if home ~= '-' and home ~= ARGV[1] and home ~= '>' .. job_id then
    if is_home[home] == nil then is_home[home] = serves(KEYS[1], home, KEYS[2]) end
    if is_home[home] then homes[of_job[i]] = home end
  end
end
return {notes, with_data, quarantined, homes, needs}
"""
)

# KEYS: queue, taken ids, counts. ARGV: page, most new ids at the front, the `taken` that was seen, number of known
# first ids, those (the first one first), known last ids (the last one first). Somebody else may have taken a known id
# away; the next known one serves as well. The reply: length, which of the first ids it goes on from (0: none, so the
# queue has to be read anew), the ids before that one, the ids behind the last one, the ids that were taken since, and
# the counts.
LOOK: Final = """
local queue, page, firsts = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[4])
local counts = redis.call('HMGET', KEYS[3], 'taken', 'moves')
local n_taken, moves, is_taken = tonumber(counts[1] or '0'), counts[2] or '0', {}
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
  return {length, 0, {}, redis.call('LRANGE', queue, 0, page - 1), taken, n_taken, moves}
end
local before = front > 0 and redis.call('LRANGE', queue, 0, front - 1) or {}
return {length, anchor, before, redis.call('LRANGE', queue, back + 1, back + page), taken, n_taken, moves}
"""
