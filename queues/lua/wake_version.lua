-- Make tasks due that were parked until a worker of this version comes.
-- KEYS  tasks that wait for a version, due set, nudge stream
-- ARGV  newest data format that the worker reads, largest number of tasks
-- returns  the number of tasks that are due now
-- Atomic: a task is due in the script that takes it from those that wait. Idempotent. The first write frees memory, so
-- that a full server accepts the rest (see fence.lua).
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local woken = 0
for i = 1, #ids do
  redis.call('ZREM', KEYS[1], ids[i])
  woken = woken + redis.call('ZADD', KEYS[2], 'XX', 'LT', 'CH', now, ids[i])
end
if woken > 0 then
  redis.call('XADD', KEYS[3], 'MAXLEN', 16, '*', 'why', 'due')
end
return woken
