-- include: tag, turns, limited, depth
-- Put tasks into the waiting lists of their limits, and tasks without limits on the ready stream.
-- KEYS  ready stream, closed mark, timeline, due set, nudge stream, rings, then one record per task, waiting lists, turns
-- ARGV  number of tasks, then of each task, in the order of the records: id, envelope, arguments, KEYID and RING ('' without
--       limits), '1' if it replaces the tasks of its KEYID that wait, else ''; then the number of waiting tasks from which
--       on none is stored, if the caller has a limit
-- returns  per task 1 stored now, 0 the id is known already, -1 the partition is closed, -3 too many tasks wait
-- Atomic: record, place in the waiting list, turn and entry in the timeline appear together, and nothing is stored once the
-- partition is closed, but for a task of an ordered KEYID that has tasks here: no later task may overtake these.
-- A task whose id has a record already is left alone. One that replaces others requests their cancellation in the same
-- act (see handle.py): a worker carries that out.
local tag, tasks = tag_of(KEYS[1]), tonumber(ARGV[1])
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[4], '')
redis.call('XRANGE', KEYS[5], '0-0', '0-0')
redis.call('ZSCORE', KEYS[6], '')
for i = 7, #KEYS do
  if i > 6 + tasks then
    redis.call('ZSCORE', KEYS[i], '')
  end
end
local closed = redis.call('EXISTS', KEYS[2]) == 1
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ms = math.floor(now / 1000)

local limit = tonumber(ARGV[ARGV[1] * 6 + 2])
local room = limit and limit - waiting(KEYS[1], limit)
local stored, times, places = {}, {}, {}
for i = 7, 6 + tasks do
  local place, at = i - 6, (i - 6) * 6 - 5
  local task, envelope, arguments, key_id, ring = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  if redis.call('EXISTS', KEYS[i]) == 1 then
    stored[place] = 0
  elseif closed and not keeps_closed(tag, key_id) then
    stored[place] = -1
  elseif room and room <= 0 then
    stored[place] = -3
  elseif key_id == '' then
    local entry = redis.call('XADD', KEYS[1], '*', 'env', envelope, 'args', arguments)
    redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry, 'env', envelope, 'args', arguments)
    stored[place] = 1
  else
    if ARGV[at + 6] == '1' then
      request_replacement(tag, key_id, task)
    end
    local list, turns = tag .. 'limited:' .. key_id, tag .. 'turns:' .. ring
    if not places[list] then
      local last = redis.call('ZRANGE', list, -1, -1, 'WITHSCORES')[2]
      places[list] = math.max(now, last and tonumber(last) + 1 or 0)
      if not last or not redis.call('ZSCORE', turns, key_id) then
        give_turn(tag, key_id, ring, now / 1000)
      end
    else
      places[list] = places[list] + 1
    end
    redis.call('ZADD', list, places[list], task)
    redis.call('HSET', KEYS[i], 'state', 'limited', 'at', ms, 'env', envelope, 'args', arguments,
      'gate', key_id .. ' ' .. ring .. ' ' .. string.format('%.0f', places[list]))
    stored[place] = 1
  end
  if stored[place] == 1 then
    room = room and room - 1
    times[#times + 1] = ms
    times[#times + 1] = task
  end
end
if times[1] then
  redis.call('ZADD', KEYS[3], unpack(times))
end
return stored
