-- include: fence
-- Put a suspect into quarantine, for a process that runs nothing else. Costs neither an attempt nor a crash.
-- KEYS  ready stream, nudge stream, record
-- ARGV  fence (4), consumer of quarantined messages
-- returns  0 refused, the lease has passed; 1 quarantined
-- Atomic: the message stays pending, so it is never in no place. Its idle time starts again: if no worker runs
-- suspects, any worker claims it after a lease. The task stays a suspect (field suspect) until it has an outcome or has
-- run for the probation time. The delivery count stays, and field `returned` says that this delivery was no crash.
if not owned(KEYS[1]) then
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
  return pending and pending[2] == ARGV[5] and tostring(pending[4]) == ARGV[4] and 1 or 0
end
-- a key of another type ends the script here, before its first write
redis.call('HEXISTS', KEYS[3], '')
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', 0, 'JUSTID')
if count_returned(KEYS[3]) then
  redis.call('HSET', KEYS[3], 'suspect', '1')
end
redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'suspect')
return 1
