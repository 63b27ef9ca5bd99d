-- Add a message to the inbox of a task once, and wake the task if a message wakes it.
-- KEYS  record, due set, nudge stream
-- ARGV  task id, digest of the message id, the message, largest number of messages in an inbox
-- returns  {'sent', its number, state of the task}; {'missing'}; {'moved', id of the successor}; {'ended', state};
--          {'full', messages in the inbox}
-- Atomic: the message is stored, its id is known, and the task is due, all or none. Idempotent: after a lost reply, or
-- a second run of the sender, it answers with the first number, as long as no more messages followed than an inbox
-- holds. The first write needs memory, so that a full server refuses the whole script. A dead letter keeps its
-- messages for its replay. Messages that were dropped from a full inbox make room once they are the oldest. The inbox
-- is part of the record: it has no key and no TTL of its own. What wakes a parked task: see park.lua.
local known = redis.call('HMGET', KEYS[1], 'state', 'mi:' .. ARGV[2], 'handed_to', 'mail', 'used', 'waits', 'wakes')
local state = known[1]
if not state then
  return {'missing'}
elseif known[2] then
  return {'sent', known[2], state}
elseif known[3] then
  return {'moved', known[3]}
elseif state == 'succeeded' or state == 'cancelled' then
  return {'ended', state}
end
local most, mail, used = tonumber(ARGV[4]), tonumber(known[4] or 0), tonumber(known[5] or 0)
if mail - used >= most then
  while used < mail and redis.call('HEXISTS', KEYS[1], 'm:' .. used + 1) == 0 do
    used = used + 1
  end
  if mail - used >= most then
    return {'full', tostring(mail - used)}
  end
  redis.call('HSET', KEYS[1], 'used', used)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local number = redis.call('HINCRBY', KEYS[1], 'mail', 1)
redis.call('HSET', KEYS[1], 'm:' .. number, now .. ' ' .. ARGV[3], 'mi:' .. ARGV[2], number, 'mn:' .. number, ARGV[2])
local past = 'mn:' .. number - most
redis.call('HDEL', KEYS[1], 'mi:' .. (redis.call('HGET', KEYS[1], past) or ''), past)
if state == 'scheduled' and known[6] and (known[7] or 'message') == 'message' then
  local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  if redis.call('ZADD', KEYS[2], 'XX', 'LT', 'CH', now, ARGV[1]) == 1 then
    redis.call('HSET', KEYS[1], 'due', now)
    if now < tonumber(first[2]) then
      redis.call('XADD', KEYS[3], 'MAXLEN', 16, '*', 'why', 'due')
    end
  end
end
redis.call('PUBLISH', KEYS[1], 'message')
return {'sent', tostring(number), state}
