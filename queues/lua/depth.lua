-- The prelude of scripts that count the tasks of a partition which wait for a worker: `depth` in the line `-- include:`.
-- in_lists(key, left): the tasks in waiting lists of limits, of so many KEYIDs at most: a lower bound if there are more. Of an
--   ordered KEYID, a first task that has started is left out. The keys are made from the tag of this one, see limited.lua.
-- waiting(ready, most): these tasks, and the messages of the ready stream that no worker holds; if that are so many, without
--   the lists. XPENDING runs through pcall: before the first worker comes, there is no group. Consumers whose names start with
--   `~` are not workers: their messages wait.
local function in_lists(key, left)
  local tag, found = string.match(key, '^.-}:'), 0
  for _, ring in ipairs(redis.call('ZRANGE', tag .. 'rings', 0, left)) do
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
end

local function waiting(ready, most)
  local held = 0
  local pending = redis.pcall('XPENDING', ready, 'workers')
  for _, consumer in ipairs(pending[4] or {}) do
    if string.sub(consumer[1], 1, 1) ~= '~' then
      held = held + tonumber(consumer[2])
    end
  end
  local count = math.max(0, redis.call('XLEN', ready) - held)
  return count < most and count + in_lists(ready, most - count) or count
end
