-- The prelude of scripts that give a KEYID of limits its turn: `turns` in the line `-- include:`. See limited.lua.
-- Include tag.lua before it.
-- sound_line(tag, key_id, ring): whether waiting list, turns and rings can be used: none is of another type.
-- give_turn(tag, key_id, ring, look): let a KEYID be looked at, at this time in milliseconds. Wakes a worker if that is the
--   earliest look. A ring that is full (`~` has the time until when) keeps its time.
-- line_of(key, gate, any): tag, KEYID and RING of the waiting list that a task is in until it ends: that of its ordered
--   KEYID, or of any KEYID. Nothing for a task without one, and if the list cannot be used. key: any of the task's.
-- leave_line(tag, task, key_id, ring, now): remove an ended task from its waiting list; the next one of an ordered KEYID has
--   its turn. now: milliseconds.
local function sound_line(tag, key_id, ring)
  for _, key in ipairs({'limited:' .. key_id, 'turns:' .. ring, 'rings'}) do
    local found = redis.pcall('ZSCORE', tag .. key, '')
    if type(found) == 'table' and found.err then
      return false
    end
  end
  return true
end

local function give_turn(tag, key_id, ring, look)
  local turns, rings = tag .. 'turns:' .. ring, tag .. 'rings'
  redis.call('ZADD', turns, look, key_id)
  local at = math.max(look, tonumber(redis.call('ZSCORE', turns, '~') or 0))
  local known = tonumber(redis.call('ZSCORE', rings, ring) or math.huge)
  if at < known then
    local first = tonumber(redis.call('ZRANGE', rings, 0, 0, 'WITHSCORES')[2] or math.huge)
    redis.call('ZADD', rings, at, ring)
    if at < first then
      redis.call('XADD', tag .. 'nudge', 'MAXLEN', 16, '*', 'why', 'due')
    end
  end
end

local function line_of(key, gate, any)
  local key_id, ring = string.match(gate or '', '^(o?[%w._,-]+) ([%w._,-]+) %d+$')
  local tag = tag_of(key)
  if key_id and (any or string.sub(key_id, 1, 1) == 'o') and sound_line(tag, key_id, ring) then
    return tag, key_id, ring
  end
end

local function leave_line(tag, task, key_id, ring, now)
  local list = tag .. 'limited:' .. key_id
  local turns = tag .. 'turns:' .. ring
  local listed = redis.call('ZSCORE', list, task) and 1 or 0 -- not one that was admitted and is parked now
  local others, last = redis.call('ZCARD', list) > listed, redis.call('ZCARD', turns) == 1
  redis.call('ZREM', list, task)
  if others and string.sub(key_id, 1, 1) == 'o' then
    give_turn(tag, key_id, ring, now)
  elseif not others and redis.call('ZREM', turns, key_id) == 1 and last then
    redis.call('ZREM', tag .. 'rings', ring)
  end
end
