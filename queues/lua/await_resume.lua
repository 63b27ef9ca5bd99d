-- include: fence
-- Settle a delivery by parking a task that a pause of an operator holds. Costs neither an attempt nor a crash.
-- KEYS  ready stream, record, due set, nudge stream, control, paused tasks of the partition
-- ARGV  fence (4), task id, number of the rule, milliseconds after which it is looked at again in any case, TTL of the
--       paused tasks in milliseconds, then names and values of counters that the record gets
-- returns  0 refused, the lease has passed; 1 settled
-- Atomic: the task is due or pending, never both, never neither. Its payload is in the record, and field `wakes` has the rule.
-- This script cannot see whether the rule is stored still, which is in another slot. If an operator has removed it meanwhile,
-- the task has a number that no rule has: see wake_paused.lua. A task whose cancellation was requested is due at once. The
-- checkpoint is not touched.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local due = now_ms()
if redis.call('HEXISTS', KEYS[5], 'cancel') == 0 then
  due = due + ARGV[7]
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[6], '')
begin_outcome(KEYS[1], KEYS[2])
put_off(KEYS[3], KEYS[4], KEYS[2], ARGV[5], due)
close(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'worker', ARGV[2], 'wakes', 'pause:' .. ARGV[6], unpack(ARGV, 9))
redis.call('HDEL', KEYS[2], 'waits')
redis.call('ZADD', KEYS[6], ARGV[6], ARGV[5])
redis.call('PEXPIRE', KEYS[6], ARGV[8])
redis.call('PUBLISH', KEYS[2], 'waiting')
return 1
