-- include: fence
-- Settle a delivery by parking a task that needs a newer worker, until one comes or its time has passed.
-- KEYS  ready stream, record, due set, nudge stream, control, tasks that wait for a version
-- ARGV  fence (4), task id, version that it needs (a data format, or a version of the task's code), longest wait in
--       milliseconds, what it waits for, then names and values of counters that the record gets
-- returns  0 refused, the lease has passed; 1 settled
-- Atomic: the task is due or pending, never both, never neither. Its payload is in the record.
-- The wait starts at the first call for the task (field newer_since), however often an older worker gets it meanwhile.
-- A task whose cancellation was requested is due at once. The checkpoint is not touched.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local now = now_ms()
local since = redis.call('HGET', KEYS[2], 'newer_since') or now
local due = now
if redis.call('HEXISTS', KEYS[5], 'cancel') == 0 then
  due = math.max(now, since + ARGV[7])
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[6], '')
begin_outcome(KEYS[1], KEYS[2])
put_off(KEYS[3], KEYS[4], KEYS[2], ARGV[5], due)
close(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'newer_since', since, 'state', 'scheduled', 'worker', ARGV[2],
  'waits', ARGV[8], 'wakes', 'version', unpack(ARGV, 9))
redis.call('ZADD', KEYS[6], ARGV[6], ARGV[5])
redis.call('PEXPIRE', KEYS[6], ARGV[7])
redis.call('PUBLISH', KEYS[2], 'waiting')
return 1
