-- include: turns
-- Return how many tasks of a partition wait for limits. Read-only.
-- KEYS  rings
-- ARGV  largest number of KEYIDs to look at
-- returns  their number; a lower bound if there are more KEYIDs. Of an ordered KEYID, a first task that has started is left
--          out
local tag = tag_of(KEYS[1])
local left, found = tonumber(ARGV[1]), 0
for _, ring in ipairs(redis.call('ZRANGE', KEYS[1], 0, left)) do
  for _, key_id in ipairs(redis.call('ZRANGE', tag .. 'turns:' .. ring, 0, math.max(0, left))) do
    if left > 0 and key_id ~= '~' then
      left = left - 1
      local list = tag .. 'limited:' .. key_id
      found = found + redis.call('ZCARD', list)
      if string.sub(key_id, 1, 1) == 'o' then
        local first = redis.call('ZRANGE', list, 0, 0)[1]
        if first and redis.call('HGET', tag .. 'record:' .. first, 'state') ~= 'limited' then
          found = found - 1
        end
      end
    end
  end
end
return found
