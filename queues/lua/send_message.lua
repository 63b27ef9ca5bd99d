-- include: inbox, wake
-- Add a message to the inbox of a task once, and wake the task if a message wakes it.
-- KEYS  record, inbox, due set, nudge stream
-- ARGV  task id, digest of the message id, the message ('': the caller asks for a number), the number that it is
--       encrypted for ('': any), largest number of messages in an inbox, largest size of them in bytes
-- returns  {'sent', its number, state of the task (waiting: it is parked)}; {'missing'}; {'moved', id of the successor}; {'ended', state};
--          {'full', messages in the inbox, their bytes}; {'encrypted'}: the message is plain, and the task's arguments are not;
--          {'number', one to encrypt it for}: nothing was stored
-- Atomic: the message is stored, its id is known, and the task is due, all or none. Idempotent: after a lost reply, or
-- a second run of the sender, it answers with the first number, as long as no more messages followed than an inbox
-- holds. The first write needs memory, so that a full server refuses the whole script. Numbers grow with the clock:
-- a server that lost its last writes gives none of their numbers to another message. A dead letter keeps its messages
-- for its replay, and its burial has given the inbox a TTL. Messages that were dropped from a full inbox make room once
-- they are the oldest. The field `bytes` is an upper bound: the messages are measured only if it is over the limit, or not
-- there. A message that is encrypted for a number has no other: it is stored if its number is after the last one, else the
-- caller gets a new number. The numbers that were given are counted, so that concurrent senders get different ones, and
-- one of them always stores its message. A number that a caller has lost is left out.
-- What wakes a parked task: see park.lua.
local task = redis.call('HMGET', KEYS[1], 'state', 'handed_to', 'waits', 'wakes')
local known = redis.call('HMGET', KEYS[2], 'id:' .. ARGV[2], 'last', 'bytes', 'given')
local state = task[1]
local shown = state == 'scheduled' and task[3] and 'waiting' or state
if not state then
  return {'missing'}
elseif inbox_number(known[1]) > 0 then
  return {'sent', known[1], shown}
elseif task[2] then
  return {'moved', task[2]}
elseif state == 'succeeded' or state == 'cancelled' then
  return {'ended', state}
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
if ARGV[3] ~= '' and string.byte(ARGV[3]) ~= 193 and string.byte(redis.call('HGET', KEYS[1], 'args') or '') == 193 then
  return {'encrypted'}
end
local most, limit = tonumber(ARGV[5]), tonumber(ARGV[6])
local used, sent = inbox_counts(KEYS[2], most)
if sent >= LARGEST_COUNT then
  used, sent = 0, 0
end
local bytes = sent > used and not known[3] and limit or inbox_number(known[3])
if sent - used >= most or bytes + #ARGV[3] > limit then
  used, bytes = first_unread(KEYS[2], used, sent), 0
  for position = used + 1, sent do
    local number = unread_number(KEYS[2], position)
    bytes = bytes + (number and redis.call('HSTRLEN', KEYS[2], 'm:' .. number) or 0)
  end
  if sent - used >= most or bytes + #ARGV[3] > limit then
    return {'full', tostring(sent - used), tostring(bytes)}
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = inbox_number(known[2])
last = last < LARGEST_COUNT and last or 0
local number = string.format('%.0f', math.max(now, last + 1))
if ARGV[3] == '' or ARGV[4] ~= '' and inbox_number(ARGV[4]) <= last then
  local given = inbox_number(known[4])
  number = string.format('%.0f', math.max(now, last + 1, given < LARGEST_COUNT and given + 1 or 0))
  redis.call('HSET', KEYS[2], 'given', number)
  return {'number', number}
elseif ARGV[4] ~= '' then
  number = ARGV[4]
end
local stored = now .. ' ' .. ARGV[3]
sent = sent + 1
redis.call('HSET', KEYS[2], 'm:' .. number, stored, 'id:' .. ARGV[2], number,
  'n:' .. sent, number .. ' ' .. ARGV[2], 'sent', sent, 'used', used, 'last', number,
  'bytes', (sent - 1 > used and bytes or 0) + #stored)
local oldest = 'n:' .. sent - most
local digest = string.match(redis.call('HGET', KEYS[2], oldest) or '', ' (.*)$')
if digest then
  redis.call('HDEL', KEYS[2], 'id:' .. digest, oldest)
end
if state == 'scheduled' and task[3] and is_woken_by(task[4], 'message') then
  wake(KEYS[3], KEYS[4], ARGV[1], now)
end
redis.call('PUBLISH', KEYS[1], 'message')
return {'sent', number, shown}
