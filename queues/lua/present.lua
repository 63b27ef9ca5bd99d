-- What workers have announced. Reads only.
-- KEYS  announcement of one worker, then those of others
-- ARGV  none
-- returns  {milliseconds of Redis' clock, for each key: fields and values of a hash, the text of a string, or nil}
-- A string is what workers of versions before the hash announce.
local function announced(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'hash' then
    return redis.call('HGETALL', key)
  end
  return kind == 'string' and redis.call('GET', key)
end
local found = {announced(KEYS[1])}
for i = 2, #KEYS do
  found[i] = announced(KEYS[i])
end
local time = redis.call('TIME')
return {time[1] * 1000 + math.floor(time[2] / 1000), found}
