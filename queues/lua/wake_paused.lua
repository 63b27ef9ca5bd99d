-- Make tasks due that were parked by pauses which are not stored any more.
-- KEYS  due set, paused tasks of the partition, nudge stream
-- ARGV  largest number of tasks, revision of the rules, then the numbers of the rules that are stored, ascending
-- returns  {number of tasks that were taken from the paused ones, number of those that are due now}
-- Atomic: a task is due in the script that takes it from those that are paused; one that is scheduled no more is taken only.
-- Idempotent: numbers of rules are never used again, so a late call with older rules wakes no task that a stored rule
-- holds: those of later rules are beyond its revision. The first write frees memory, so that a full server accepts the
-- rest (see fence.lua).
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[1], '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local first, left, taken, woken = '-inf', tonumber(ARGV[1]), 0, 0
for i = 3, #ARGV + 1 do
  local last = ARGV[i] and '(' .. ARGV[i] or ARGV[2]
  local ids = left > taken and redis.call('ZRANGEBYSCORE', KEYS[2], first, last, 'LIMIT', 0, left - taken) or {}
  for each = 1, #ids do
    redis.call('ZREM', KEYS[2], ids[each])
    woken = woken + redis.call('ZADD', KEYS[1], 'XX', 'LT', 'CH', now, ids[each])
  end
  taken, first = taken + #ids, last
end
if woken > 0 then
  redis.call('XADD', KEYS[3], 'MAXLEN', 16, '*', 'why', 'due')
end
return {taken, woken}
