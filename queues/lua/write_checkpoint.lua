-- include: fence
-- Write entries into the checkpoint and the event log of a running task.
-- KEYS  ready stream, record, steps, log, inbox, control
-- ARGV  fence (4), then quadruples: kind, step key, value, log data
--       done: the step's result, logged as step_completed; mark: the same for a step that has an event of its own;
--       intent: the step is about to act; saved: its own progress; drop: delete its result, intent and progress;
--       event: the event type in place of the step key, its number in place of the value; taken: the run used the
--       inbox message of that number; moved: the value is the id of the successor, which gets the messages that come
--       from now on
-- returns  0 refused, the lease has passed; 1 stored; 2 stored, and cancellation was requested
-- Atomic: all entries or none. Idempotent: a result is compared; events are numbered by the run, their only writer,
-- and a number that is there already is not logged again. Nor is a result that precedes such an event: it was stored
-- before, and may have been dropped in the same script.
if not owned(KEYS[1]) then
  return 0
end

local function precedes_known_event(at)
  for i = at + 4, #ARGV, 4 do
    if ARGV[i] == 'event' then
      return tonumber(ARGV[i + 2]) <= tonumber(redis.call('HGET', KEYS[2], 'events') or 0)
    end
  end
  return false
end

local taken = false
for i = 5, #ARGV, 4 do
  local kind, step, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if kind == 'done' then
    if redis.call('HGET', KEYS[3], 'd:' .. step) ~= value and not precedes_known_event(i) then
      redis.call('HSET', KEYS[3], 'd:' .. step, value)
      redis.call('HDEL', KEYS[3], 'i:' .. step, 's:' .. step)
      redis.call('XADD', KEYS[4], '*', 'type', 'step_completed', 'step', step, 'data', ARGV[i + 3])
      redis.call('PUBLISH', KEYS[2], 'step_completed')
    end
  elseif kind == 'event' then
    if tonumber(value) > tonumber(redis.call('HGET', KEYS[2], 'events') or 0) then
      redis.call('HSET', KEYS[2], 'events', value)
      redis.call('XADD', KEYS[4], '*', 'type', step, 'n', value, 'data', ARGV[i + 3])
      redis.call('PUBLISH', KEYS[2], step)
    end
  elseif kind == 'mark' then
    redis.call('HSET', KEYS[3], 'd:' .. step, value)
    redis.call('HDEL', KEYS[3], 'i:' .. step, 's:' .. step)
  elseif kind == 'drop' then
    redis.call('HDEL', KEYS[3], 'd:' .. step, 'i:' .. step, 's:' .. step)
  elseif kind == 'taken' then
    redis.call('HDEL', KEYS[5], 'm:' .. step)
    taken = true
  elseif kind == 'moved' then
    redis.call('HSET', KEYS[2], 'handed_to', value)
  elseif kind == 'intent' then
    redis.call('HSET', KEYS[3], 'i:' .. step, value)
  else
    redis.call('HSET', KEYS[3], 's:' .. step, value)
  end
end
if taken then
  local known = redis.call('HMGET', KEYS[5], 'used', 'sent')
  local used, sent = tonumber(known[1] or 0), tonumber(known[2] or 0)
  while used < sent do
    local number = string.match(redis.call('HGET', KEYS[5], 'n:' .. used + 1) or '', '^%d+')
    if number and redis.call('HEXISTS', KEYS[5], 'm:' .. number) == 1 then
      break
    end
    used = used + 1
  end
  redis.call('HSET', KEYS[5], 'used', used)
end
if redis.call('HEXISTS', KEYS[6], 'cancel') == 1 then
  return 2
end
return 1
