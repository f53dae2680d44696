-- After count.lua. Carries out commands, each given as its number of words, and these. If the first one is refused,
-- because of the type of a key, nothing has changed. Errors of later ones are ignored, as in a transaction.
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
