-- include: fence
-- Settles a delivery by putting the task into the due set, to be run again after a delay.
-- KEYS  ready stream, record, log, due set, nudge stream
-- ARGV  fence (4), task id, delay in milliseconds, attempts, crashes, returns, event type, event data (JSON),
--       then, where the task stays a suspect, what it has been through
-- returns  0 refused, the lease has passed; 1 settled
-- A request to cancel is kept and is due at once: the next worker settles it, whatever the delay was.
-- Atomic: the payload moves from the message to the record; the task is due or pending, never both, never neither.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local due = now_ms()
if redis.call('HEXISTS', KEYS[2], 'cancel') == 0 then
  due = due + tonumber(ARGV[6])
end
local first = redis.call('ZRANGE', KEYS[4], 0, 0, 'WITHSCORES')
begin_outcome(KEYS[2])
keep_payload(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'due', due, 'attempts', ARGV[7], 'crashes', ARGV[8],
  'returns', ARGV[9], 'error', ARGV[11], 'worker', ARGV[2])
redis.call('ZADD', KEYS[4], due, ARGV[5])
close(KEYS[1], KEYS[2])
if ARGV[12] then
  redis.call('HSET', KEYS[2], 'suspect', ARGV[12])
end
redis.call('XADD', KEYS[3], '*', 'type', ARGV[10], 'data', ARGV[11])
if not first[2] or due < tonumber(first[2]) then
  redis.call('XADD', KEYS[5], 'MAXLEN', 16, '*', 'why', 'due')
end
redis.call('PUBLISH', KEYS[2], ARGV[10])
return 1
