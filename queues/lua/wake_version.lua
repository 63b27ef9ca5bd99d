-- Make tasks due that were parked until a worker of this version comes.
-- KEYS  due set, then sets of tasks that wait: for a data format, or for a version of one task's code
-- ARGV  largest number of tasks of a set, then for each set the newest version that the worker has
-- returns  the number of tasks that are due now
-- Atomic: a task is due in the script that takes it from those that wait. Idempotent. The first write frees memory, so
-- that a full server accepts the rest (see fence.lua). There is no nudge: the caller promotes the tasks. A nudge would
-- reach the consumer that has waited longest, and the messages the next one, which may be of the older version again.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[1], '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local woken = 0
for i = 2, #KEYS do
  local ids = redis.call('ZRANGEBYSCORE', KEYS[i], '-inf', ARGV[i], 'LIMIT', 0, ARGV[1])
  for each = 1, #ids do
    redis.call('ZREM', KEYS[i], ids[each])
    woken = woken + redis.call('ZADD', KEYS[1], 'XX', 'LT', 'CH', now, ids[each])
  end
end
return woken
