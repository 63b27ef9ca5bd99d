-- The prelude of scripts that count the tasks of a partition which wait for a worker: `depth` in the line `-- include:`.
-- waiting(ready, most): the messages of the ready stream that no worker holds, and the tasks in waiting lists of limits; it
--   counts no more lists once there are so many. XPENDING runs through pcall: before the first worker comes, there is no
--   group. Consumers whose names start with `~` are not workers: their messages wait. The keys of the lists are made from the
--   tag of the ready stream, see limited.lua.
local function waiting(ready, most)
  local held = 0
  local pending = redis.pcall('XPENDING', ready, 'workers')
  for _, consumer in ipairs(pending[4] or {}) do
    if string.sub(consumer[1], 1, 1) ~= '~' then
      held = held + tonumber(consumer[2])
    end
  end
  local count = math.max(0, redis.call('XLEN', ready) - held)
  local tag = string.match(ready, '^.-}:')
  for _, ring in ipairs(redis.call('ZRANGE', tag .. 'rings', 0, -1)) do
    local turns = count < most and redis.call('ZRANGE', tag .. 'turns:' .. ring, 0, most) or {}
    for _, key_id in ipairs(turns) do
      if key_id ~= '~' and count < most then
        count = count + redis.call('ZCARD', tag .. 'limited:' .. key_id)
      end
    end
  end
  return count
end
