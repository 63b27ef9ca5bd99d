-- The prelude of scripts that put tasks into waiting lists of limits: `limited` in the line `-- include:`.
-- A waiting list has the tasks of one KEYID by their places. KEYIDs that have waiting tasks take turns in the ring of
-- their limits, and the rings of a partition are in one set: both by the time of the next look. KEYID and RING of a task
-- are the first two words of its field `gate`, the third is its place. All keys are in the slot of `rings`.
-- gate_of(record): KEYID, RING and place of a task; nothing if the record has none, or another program wrote it.
-- line_keys(rings, key_id, ring): the waiting list, and the turns of its ring.
-- check_line(rings, key_id, ring): a key of another type ends the script here, before its first write.
-- wait_in_line(rings, nudges, record, task, key_id, ring, place, now, look): add a task to its waiting list: at this
--   place, or, if it is nil, at the end. now: microseconds. look: milliseconds of the next look at a KEYID that has
--   no turn yet. Wakes a worker if that is earlier than all others. A ring whose limits have no room at all
--   (`~` among the turns) keeps its time. The caller stores the state.
-- leave_line(rings, nudges, record, task, now): an ordered task leaves its list at its end, and the next one has its turn.
local function gate_of(record)
  local gate = redis.call('HGET', record, 'gate')
  return string.match(gate or '', '^(o?%x+) ([%w._,-]+) (%d+)$')
end

local function line_keys(rings, key_id, ring)
  local tag = string.match(rings, '^(.*:)rings$')
  return tag .. 'limited:' .. key_id, tag .. 'turns:' .. ring
end

local function check_line(rings, key_id, ring)
  local list, turns = line_keys(rings, key_id, ring)
  redis.call('ZSCORE', list, '')
  redis.call('ZSCORE', turns, '')
  redis.call('ZSCORE', rings, '')
end

local function give_turn(rings, nudges, turns, key_id, ring, look)
  redis.call('ZADD', turns, look, key_id)
  local full = tonumber(redis.call('ZSCORE', turns, '~') or 0)
  local known = redis.call('ZSCORE', rings, ring)
  local at = math.max(look, full)
  if not known or at < tonumber(known) then
    local first = redis.call('ZRANGE', rings, 0, 0, 'WITHSCORES')[2]
    redis.call('ZADD', rings, at, ring)
    if not first or at < tonumber(first) then
      redis.call('XADD', nudges, 'MAXLEN', 16, '*', 'why', 'due')
    end
  end
end

local function wait_in_line(rings, nudges, record, task, key_id, ring, place, now, look)
  local list, turns = line_keys(rings, key_id, ring)
  if not place then
    local last = redis.call('ZRANGE', list, -1, -1, 'WITHSCORES')[2]
    place = math.max(now, last and tonumber(last) + 1 or 0)
  end
  redis.call('ZADD', list, place, task)
  redis.call('HSET', record, 'gate', key_id .. ' ' .. ring .. ' ' .. string.format('%.0f', place))
  if not redis.call('ZSCORE', turns, key_id) then
    give_turn(rings, nudges, turns, key_id, ring, look)
  end
end

local function leave_line(rings, nudges, record, task, now)
  local key_id, ring = gate_of(record)
  if key_id then
    local list, turns = line_keys(rings, key_id, ring)
    redis.call('ZREM', list, task)
    if string.sub(key_id, 1, 1) == 'o' and redis.call('ZCARD', list) > 0 then
      give_turn(rings, nudges, turns, key_id, ring, now / 1000)
    end
  end
end
