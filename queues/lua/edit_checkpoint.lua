-- Edit the checkpoint of a task that no worker has, log it as an event, and wake the task if it waits for the edit.
-- KEYS  record, steps, log, due set, nudge stream
-- ARGV  task id, number of its last event, of its last entry, type and data of the event, what a task waits for that
--       the edit wakes, number of fields to delete, their names, then names and values of fields to set
-- returns  2 edited, and the task is due now; 1 edited; 0 refused: a worker has the task or may take it, it has ended, or
--          the numbers are others: a run or another edit has written since they were read
-- Atomic: no worker reads half an edit. A run takes its numbers and its checkpoint when it starts: a task in the due set
-- or a dead letter has no run, and the numbers tell whether there was one since. Not idempotent: after a lost reply the
-- second call is refused, because the numbers are others. The steps exist here, so they have the TTL of the record.
local task = redis.call('HMGET', KEYS[1], 'state', 'events', 'entries', 'waits')
if (task[1] ~= 'scheduled' and task[1] ~= 'dead') or (task[2] or '0') ~= ARGV[2] or (task[3] or '0') ~= ARGV[3]
  or redis.call('EXISTS', KEYS[2]) == 0 then
  return 0
end
local first = 8 + ARGV[7]
redis.call('HSET', KEYS[1], 'events', ARGV[2] + 1, 'entries', ARGV[3] + 1)
for i = first, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
for i = 8, first - 1 do
  redis.call('HDEL', KEYS[2], ARGV[i])
end
redis.call('XADD', KEYS[3], '*', 'type', ARGV[4], 'n', ARGV[2] + 1, 'data', ARGV[5], 'e', ARGV[3] + 1)
redis.call('PUBLISH', KEYS[1], ARGV[4])
if task[1] ~= 'scheduled' or task[4] ~= ARGV[6] then
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local earliest = redis.call('ZRANGE', KEYS[4], 0, 0, 'WITHSCORES')
if redis.call('ZADD', KEYS[4], 'XX', 'LT', 'CH', now, ARGV[1]) == 1 and now < tonumber(earliest[2]) then
  redis.call('XADD', KEYS[5], 'MAXLEN', 16, '*', 'why', 'due')
end
return 2
