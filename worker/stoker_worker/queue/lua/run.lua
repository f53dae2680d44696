-- After count.lua. Carries out commands: for each, how many words it has, and these. The first one may be refused,
-- because of what a key holds, and then nothing has changed. Later ones are as in a transaction.
local function run(words, at)
  local call = redis.call
  while at <= #words do
    local last = at + tonumber(words[at])
    if words[at + 1] == 'count' then
      count(unpack(words, at + 2, last))
    else
      call(unpack(words, at + 1, last))
    end
    at, call = last + 1, redis.pcall
  end
end
