-- include: payload, tag, turns, limited
-- Find tasks that another program has taken out of the queue, and put them back.
-- KEYS  ready stream, due set, then one record per task
-- ARGV  group, '1' to put them back, milliseconds for which a run is left alone: since its last heartbeat, and since a call
--       has found its message lost (0: put back at once), largest number of bytes of messages to look at, then the ids, in
--       the order of the records
-- returns  for each task that was looked at: 0 it is where its record says, or a run may still be at work; 1 its
--          message is in no stream; 2 its message was read, but is not pending: no worker gets it; 3 it is not in the due
--          set; 4 the same as 1, and its record has no payload; 5 it is not in its waiting list, or that has no turn; 6 the
--          same, and the list or its turns are of another type. Those of 1 to 3 and 5 are put back now, if the caller wants that
-- Atomic per task: all that a script of Perdure does is done or not done when this looks. It never adds a second message:
-- a message is pending (running, released or in quarantine; claims and workers care for those that were deleted), new,
-- or replaced by a message with a new id. So the fence of a former delivery stays refused. Delivery counts start again.
-- A run that began just now has had no heartbeat yet: unless the message was never delivered, field `lost` (its id, and the
-- time of the first call that found it lost) keeps the task until that run has noticed.
-- A full server refuses the script at its first write. A task whose due time is lost is due at once if it waits: it waits
-- again if what it waits for has not come.
local group, mend, grace = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3])
local left = tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local delivered
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
for i = 1, #groups do
  local found = {}
  for at = 1, #groups[i], 2 do
    found[groups[i][at]] = groups[i][at + 1]
  end
  if found['name'] == group then
    delivered = found['last-delivered-id']
  end
end

local function part_of(message, name)
  for i = 1, #message, 2 do
    if message[i] == name then
      return message[i + 1]
    end
  end
end

-- A stream that was deleted gives ids of the same millisecond again.
local function is_of(task, message)
  local envelope = part_of(message, 'env') or ''
  if string.find(envelope, '"' .. task .. '"', 1, true) then
    return true
  end
  local read, found = pcall(cjson.decode, envelope)
  return not read or type(found) ~= 'table' or found['id'] == task
end

-- An id that no id can follow is refused as the start of a range: then nothing is new (hence pcall).
local function place(task, entry)
  local found = redis.call('XRANGE', KEYS[1], entry, entry)[1]
  for i = 2, found and #found[2] or 0, 2 do
    left = left - #found[2][i]
  end
  if found and not is_of(task, found[2]) then
    return 1, {}
  elseif redis.pcall('XPENDING', KEYS[1], group, entry, entry, 1)[1] then
    return 0
  elseif not found then
    return 1, {}
  elseif not delivered or redis.pcall('XRANGE', KEYS[1], '(' .. delivered, entry, 'COUNT', 1)[1] then
    return 0
  end
  return 2, found[2]
end

-- No id of the task occurs twice, so that no fence does.
local function add(entry, envelope, arguments)
  local new = redis.call('XADD', KEYS[1], '*', 'env', envelope, 'args', arguments, 'again', '1')
  local ms, number = string.match(entry, '^(%d+)%-(%d+)$')
  local same = string.match(new, '^' .. ms .. '%-(%d+)$')
  if same and tonumber(same) <= tonumber(number) then
    redis.call('XDEL', KEYS[1], new)
    new = redis.call('XADD', KEYS[1], ms .. '-' .. number + 1, 'env', envelope, 'args', arguments, 'again', '1')
  end
  return new
end

local function is_new(entry)
  local ms, number = string.match(entry, '^(%d+)%-(%d+)$')
  local last, last_number = string.match(delivered or '0-0', '^(%d+)%-(%d+)$')
  ms, last = tonumber(ms), tonumber(last)
  return last > 0 and (ms > last or (ms == last and tonumber(number) > tonumber(last_number)))
end

local function may_run(record, entry)
  if grace == 0 or is_new(entry) then
    return false
  end
  local known, since = string.match(redis.call('HGET', record, 'lost') or '', '^(%S+) (%d+)$')
  if known ~= entry then
    redis.call('HSET', record, 'lost', entry .. ' ' .. string.format('%.0f', now))
    return true
  end
  return now - since < grace
end

-- Return the answer for the waiting list of a task, and put it back there.
local tag = tag_of(KEYS[1])
local function in_line(record, task, state, envelope)
  local key_id, ring, place = gate_of(record, envelope)
  if not key_id or (state ~= 'limited' and (string.sub(key_id, 1, 1) ~= 'o' or place == 0)) then
    return 0
  elseif not sound_line(tag, key_id, ring) then
    return 6
  end
  local score = redis.call('ZSCORE', tag .. 'limited:' .. key_id, task)
  local turn = state ~= 'limited' or (redis.call('ZSCORE', tag .. 'turns:' .. ring, key_id) and redis.call('ZSCORE', tag .. 'rings', ring))
  local placed = score and place > 0 and tonumber(score) == place
  if placed and turn then
    return 0
  elseif mend then
    wait_in_line(tag, record, task, key_id, ring, place, time[1] * 1000000 + time[2], now)
    give_turn(tag, key_id, ring, now)
  end
  return 5
end

local answers = {}
for i = 3, #KEYS do
  local task, answer = ARGV[i + 2], 0
  local state, entry, alive, waits, due = unpack(redis.call('HMGET', KEYS[i], 'state', 'entry', 'alive', 'waits', 'due'))
  local envelope = (state == 'limited' or state == 'queued' or state == 'scheduled') and redis.call('HGET', KEYS[i], 'env')
  if state == 'queued' and string.match(entry or '', '^%d+%-%d+$') then
    if now - (tonumber(alive) or 0) >= grace then
      local message
      answer, message = place(task, entry)
      if answer > 0 then
        local envelope, arguments = payload(KEYS[i], task)
        envelope = envelope or part_of(message, 'env')
        arguments = arguments or part_of(message, 'args') or '{}'
        if not envelope then
          answer = 4
        elseif mend and may_run(KEYS[i], entry) then
          answer = 0
        elseif mend then
          local new = add(entry, envelope, arguments)
          if answer == 2 then
            redis.call('XDEL', KEYS[1], entry)
          end
          redis.call('HSETNX', KEYS[i], 'at', string.match(entry, '^%d+'))
          redis.call('HSET', KEYS[i], 'entry', new)
          redis.call('HDEL', KEYS[i], 'run', 'began', 'alive', 'step', 'step_at', 'returned', 'lost')
        end
      end
    end
  elseif state == 'scheduled' and not redis.call('ZSCORE', KEYS[2], task) then
    answer = 3
    if mend then
      redis.call('ZADD', KEYS[2], not waits and tonumber(due) or now, task)
    end
  end
  if answer == 0 and envelope then
    answer = in_line(KEYS[i], task, state, envelope)
  end
  answers[i - 2] = answer
  if left < 0 then
    break
  end
end
return answers
