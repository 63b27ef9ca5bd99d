-- include: inbox, values
-- Set a value of a task.
-- KEYS  record, inbox
-- ARGV  name, the value, digest of the update's id, largest number of values, number of the change if it is one of
--       the task that this one continues ('' otherwise)
-- returns  {'set', number of the change, state of the task (waiting: it is parked)}; {'missing'}; {'moved', id of the
--          successor}; {'ended', state}; {'encrypted'}: see send_message.lua; {'full', number of values}
-- Atomic: of two updates, the later one counts. Idempotent: after a lost reply it answers with the same, and changes
-- nothing that was set since, until 32 other updates have come. A change of the task that this one continues has the number
-- that it has there, and replaces no later one: numbers follow the clock. A dead letter keeps its values for its replay,
-- and its burial has given the inbox a TTL.
local task = redis.call('HMGET', KEYS[1], 'state', 'handed_to', 'waits')
local state = task[1]
if not state then
  return {'missing'}
end
local shown = state == 'scheduled' and task[3] and 'waiting' or state
local present = string.format('%.0f', value_number(KEYS[2], ARGV[1]))
local digests = redis.call('HGET', KEYS[2], 'updates') or ''
if string.find(',' .. digests .. ',', ',' .. ARGV[3] .. ',', 1, true) then
  return {'set', present, shown}
elseif task[2] then
  return {'moved', task[2]}
elseif state == 'succeeded' or state == 'cancelled' then
  return {'ended', state}
elseif string.byte(ARGV[2]) ~= 193 and string.byte(redis.call('HGET', KEYS[1], 'args') or '') == 193 then
  return {'encrypted'}
end
local number = tonumber(ARGV[5])
if number and tonumber(present) >= number then
  return {'set', present, shown}
end
local names, known = value_names(KEYS[2])
if not known[ARGV[1]] and #names >= tonumber(ARGV[4]) then
  return {'full', tostring(#names)}
end
set_value(KEYS[2], KEYS[1], ARGV[1], ARGV[2], number)
-- 32 digests of 24 characters, with commas
redis.call('HSET', KEYS[2], 'o:' .. ARGV[1], string.format('%.0f', value_number(KEYS[2], ARGV[1])),
  'updates', string.sub(ARGV[3] .. (digests == '' and '' or ',') .. digests, 1, 799))
return {'set', string.format('%.0f', value_number(KEYS[2], ARGV[1])), shown}
