-- include: fence
-- Settle a delivery by parking a task that needs a newer worker, until one comes or its time has passed.
-- KEYS  ready stream, record, due set, nudge stream, control, tasks that wait for a version
-- ARGV  fence (4), task id, data format that it needs, longest wait in milliseconds
-- returns  0 refused, the lease has passed; 1 settled
-- Atomic: the payload moves from the message to the record, and the task is due or pending, never both, never neither.
-- The wait starts at the first call for the task (field newer_since), however often an older worker gets it meanwhile.
-- A task whose cancellation was requested is due at once. Neither counters nor checkpoint are touched.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local now = now_ms()
local first = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
begin_outcome(KEYS[2])
keep_payload(KEYS[1], KEYS[2])
redis.call('HSETNX', KEYS[2], 'newer_since', now)
local due = now
if redis.call('HEXISTS', KEYS[5], 'cancel') == 0 then
  due = math.max(now, redis.call('HGET', KEYS[2], 'newer_since') + ARGV[7])
end
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'worker', ARGV[2], 'waits', 'version ' .. ARGV[6], 'wakes', 'version')
redis.call('ZADD', KEYS[3], due, ARGV[5])
redis.call('ZADD', KEYS[6], ARGV[6], ARGV[5])
redis.call('PEXPIRE', KEYS[6], ARGV[7])
close(KEYS[1], KEYS[2])
if not first[2] or due < tonumber(first[2]) then
  redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'due')
end
redis.call('PUBLISH', KEYS[2], 'waiting')
return 1
