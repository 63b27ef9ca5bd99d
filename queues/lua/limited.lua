-- The prelude of scripts that put tasks into the waiting lists of limits: `limited` in the line `-- include:`.
-- A waiting list, `limited:KEYID`, has the tasks of one KEYID by their places. The KEYIDs that have waiting tasks are in
-- `turns:RING` by the time of their next look, and the rings of a partition in `rings`. KEYID, RING and place of a task are
-- the words of its field `gate` (place 0: it has none yet). KEYIDs of ordered limits begin with `o`: such a list has a
-- task from its first place until it ends. All keys are made from the tag of a key of the same slot.
-- gate_of(record, envelope): KEYID, RING and place of a task that has limits; nothing for another one. Without the field,
--   or if another program wrote it, KEYID and RING follow from the envelope, as in keys.py.
-- wait_in_line(tag, record, task, key_id, ring, place, now, look): add a task to its waiting list: at this place, or at the
--   end if it is 0. now: microseconds. look: milliseconds of the next look at a KEYID that has no turn yet.
-- keeps_closed(tag, key_id): whether a closed partition takes a task of this KEYID: an ordered one that has tasks here, which
--   no later task may overtake.
-- request_replacement(tag, key_id, task): request the cancellation of those that wait and were never started (see handle.py).
-- Include turns.lua before it.
local function limits_of(envelope)
  if envelope and string.find(envelope, '"limits":[', 1, true) then
    local read, form = pcall(cjson.decode, envelope)
    local limits = read and type(form) == 'table' and form['limits']
    return type(limits) == 'table' and #limits > 0 and limits or nil
  end
end

local function derived(limits)
  local parts, ordered = {}, nil
  for i = 1, #limits do
    local use = limits[i]
    local name, key = type(use) == 'table' and tostring(use[1]) or '', type(use) == 'table' and tostring(use[2]) or ''
    if not string.match(name, '^[%w._-]+$') or not string.match(key, '^[%x-]+$') then
      return
    end
    parts[i] = {name, key == '-' and '-' .. name or key}
    if not ordered and string.find(tostring(use[4]), 'o', 1, true) then
      ordered = parts[i]
    end
  end
  if ordered then
    return 'o' .. ordered[2], ordered[1]
  end
  table.sort(parts, function(one, other)
    return one[1] < other[1]
  end)
  local keys, names = {}, {}
  for i = 1, #parts do
    names[i], keys[i] = parts[i][1], parts[i][2]
  end
  return table.concat(keys, ','), table.concat(names, ',')
end

local function gate_of(record, envelope)
  local limits = limits_of(envelope)
  if limits then
    local gate = redis.call('HGET', record, 'gate') or ''
    local key_id, ring, place = string.match(gate, '^(o?[%w._,-]+) ([%w._,-]+) (%d+)$')
    if key_id then
      return key_id, ring, tonumber(place)
    end
    key_id, ring = derived(limits)
    return key_id, ring, 0
  end
end

local function wait_in_line(tag, record, task, key_id, ring, place, now, look)
  local list, first = tag .. 'limited:' .. key_id, true
  if place == 0 then
    local last = redis.call('ZRANGE', list, -1, -1, 'WITHSCORES')[2]
    place = math.max(now, last and tonumber(last) + 1 or 0)
    first = not last
  end
  redis.call('ZADD', list, place, task)
  redis.call('HSET', record, 'gate', key_id .. ' ' .. ring .. ' ' .. string.format('%.0f', place))
  -- the turn of an ordered KEYID whose tasks have all started is far away
  if first or not redis.call('ZSCORE', tag .. 'turns:' .. ring, key_id) then
    give_turn(tag, key_id, ring, look)
  end
end

local function keeps_closed(tag, key_id)
  return string.sub(key_id, 1, 1) == 'o' and redis.call('ZCARD', tag .. 'limited:' .. key_id) > 0
end

local function request_replacement(tag, key_id, task)
  local found = redis.call('ZRANGE', tag .. 'limited:' .. key_id, -1000, -1)
  for i = 1, #found do
    local of = redis.call('HMGET', tag .. 'record:' .. found[i], 'state', 'at', 'token', 'replays', 'settled')
    if of[1] == 'limited' and not of[5] then
      local life = (of[2] or '') .. ' ' .. (of[3] or '') .. ' ' .. (of[4] or '')
      redis.call('ZADD', tag .. 'due', 0, '~cancel ' .. found[i] .. ' ' .. life .. ' ' .. task .. ' 1')
    end
  end
  if found[1] then
    redis.call('XADD', tag .. 'nudge', 'MAXLEN', 16, '*', 'why', 'due')
  end
end
