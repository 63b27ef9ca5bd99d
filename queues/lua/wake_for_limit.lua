-- include: wake
-- Wake a task that is parked until a limit has room for a call of its handler, or notify the run that waits in memory.
-- KEYS  due set, nudge stream, record, lock of the worker that promotes the due tasks
-- ARGV  task id
-- returns  2 the task is parked for a limit, and due now; 1 likewise, but no worker promotes it; 0 it does not wait, or was due
--          already
-- Atomic: look and wake in one act. Idempotent: a task that is due already stays due. A hint that comes before the task is parked wakes nothing, so the run
-- asks once more after it was parked (worker/durable/limit_tokens.py).
local task = redis.call('HMGET', KEYS[3], 'state', 'waits', 'wakes')
if not task[1] then
  return 0
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[1], '')
local time = redis.call('TIME')
local woken = false
if task[1] == 'scheduled' and task[2] and string.find(' ' .. (task[3] or ''), ' limit:', 1, true) then
  woken = wake(KEYS[1], KEYS[2], ARGV[1], time[1] * 1000 + math.floor(time[2] / 1000))
end
redis.call('PUBLISH', KEYS[3], 'limit')
return woken and 1 + redis.call('EXISTS', KEYS[4]) or 0
