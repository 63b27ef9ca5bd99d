-- include: fence
-- Settles a delivery by putting the task into the due set, to be run again after a delay, or when what it waits for comes.
-- KEYS  ready stream, record, log, due set, nudge stream
-- ARGV  fence (4), task id, delay in milliseconds, attempts, crashes, returns, event type, event data (JSON),
--       then, where the task stays a suspect, what it has been through ('' where it does not),
--       then, where it waits for something, what that is, and the number of the last message that the run knows of
-- returns  0 refused, the lease has passed; 1 settled
-- A request to cancel is kept and is due at once: the next worker settles it, whatever the delay was. So is a task that
-- waits where a message came after the run had looked: it cannot come between the look and this. Of a task that waits,
-- the run has told the log already, and it made no error.
-- Atomic: the payload moves from the message to the record; the task is due or pending, never both, never neither.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local due = now_ms()
local known = redis.call('HMGET', KEYS[2], 'cancel', 'mail')
if not known[1] and not (ARGV[13] and tonumber(known[2] or 0) > tonumber(ARGV[14])) then
  due = due + tonumber(ARGV[6])
end
local first = redis.call('ZRANGE', KEYS[4], 0, 0, 'WITHSCORES')
begin_outcome(KEYS[2])
keep_payload(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'due', due, 'attempts', ARGV[7], 'crashes', ARGV[8],
  'returns', ARGV[9], 'worker', ARGV[2])
redis.call('ZADD', KEYS[4], due, ARGV[5])
close(KEYS[1], KEYS[2])
if ARGV[12] and ARGV[12] ~= '' then
  redis.call('HSET', KEYS[2], 'suspect', ARGV[12])
end
if ARGV[13] then
  redis.call('HSET', KEYS[2], 'waits', ARGV[13])
else
  redis.call('HSET', KEYS[2], 'error', ARGV[11])
  redis.call('HDEL', KEYS[2], 'waits')
  redis.call('XADD', KEYS[3], '*', 'type', ARGV[10], 'data', ARGV[11])
end
if not first[2] or due < tonumber(first[2]) then
  redis.call('XADD', KEYS[5], 'MAXLEN', 16, '*', 'why', 'due')
end
redis.call('PUBLISH', KEYS[2], ARGV[10])
return 1
