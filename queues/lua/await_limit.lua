-- include: fence, tag, turns, limited
-- Settle a delivery by putting the task into the waiting list of its limits. Costs neither an attempt nor a crash.
-- KEYS  ready stream, record, due set, nudge stream, control, log, then waiting list, turns and rings
-- ARGV  fence (4), last entry (see gap), task id, attempts, crashes, returns, KEYID, RING, milliseconds until the next
--       look, event type ('' for a delivery that never started: nothing is logged), event data (JSON), envelope that has the limits
--       in place of that of the message, '' for none
-- returns  0 refused, the lease has passed; 1 settled; -1 - N refused, see gap
-- Atomic: the task waits or is pending, never both, never neither. Its payload is in the record.
-- A task of an ordered key returns to its place, another one goes to the end. A task whose cancellation was requested is
-- due at once, and then goes to a worker without tokens. A log without an id left (hence pcall) does not make a settled delivery
-- fail.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
-- a key of another type ends the script here, before its first write
for i = 7, #KEYS do
  redis.call('ZSCORE', KEYS[i], '')
end
redis.call('ZSCORE', KEYS[3], '')
redis.call('XRANGE', KEYS[6], '0-0', '0-0')
local tag, task, key_id, ring = tag_of(KEYS[1]), ARGV[6], ARGV[10], ARGV[11]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local place = string.match(redis.call('HGET', KEYS[2], 'gate') or '', '^' .. key_id .. ' %S+ (%d+)$')
begin_outcome(KEYS[1], KEYS[2])
if redis.call('HEXISTS', KEYS[5], 'cancel') == 1 then
  put_off(KEYS[3], KEYS[4], KEYS[2], task, now_ms())
  redis.call('HSET', KEYS[2], 'state', 'scheduled')
else
  place = string.sub(key_id, 1, 1) == 'o' and tonumber(place) or 0
  redis.call('HSETNX', KEYS[2], 'at', string.match(ARGV[3], '^%d+'))
  redis.call('HSET', KEYS[2], 'state', 'limited')
  wait_in_line(tag, KEYS[2], task, key_id, ring, place, now, now / 1000 + tonumber(ARGV[12]))
end
close(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'worker', ARGV[2], 'attempts', ARGV[7], 'crashes', ARGV[8], 'returns', ARGV[9])
redis.call('HDEL', KEYS[2], 'waits', 'wakes')
if ARGV[15] ~= '' then
  redis.call('HSET', KEYS[2], 'env', ARGV[15])
  redis.call('HDEL', KEYS[2], 'task', 'app')
end
if ARGV[13] ~= '' then
  redis.pcall('XADD', KEYS[6], '*', 'type', ARGV[13], 'data', ARGV[14])
end
redis.call('PUBLISH', KEYS[2], 'limited')
return 1
