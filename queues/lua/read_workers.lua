-- Read what workers have registered. Read-only.
-- KEYS  the key of one worker, then those of others
-- ARGV  none
-- returns  {milliseconds of Redis' clock, for each key: fields and values of a hash, the text of a string, or nil}
-- A string was written by a worker of a version before the hash: Redis answers HGETALL with an error.
local function announced(key)
  local found = redis.pcall('HGETALL', key)
  if found.err then
    found = redis.pcall('GET', key)
  end
  if type(found) == 'table' and found.err then
    return false
  end
  return found
end
local found = {announced(KEYS[1])}
for i = 2, #KEYS do
  found[i] = announced(KEYS[i])
end
local time = redis.call('TIME')
return {time[1] * 1000 + math.floor(time[2] / 1000), found}
