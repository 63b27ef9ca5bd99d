-- include: fence
-- Put a suspect into quarantine, for a worker that runs it alone. Costs neither an attempt nor a crash.
-- KEYS  ready stream, nudge stream
-- ARGV  fence (4), consumer of quarantined messages
-- returns  0 refused, the lease has passed; 1 quarantined
-- Atomic: the message stays pending, so it is never in no place. Its idle time starts again: if no worker runs
-- suspects alone, any worker claims it after a lease. The delivery count is lowered by the one that the next claim
-- adds.
if not owned(KEYS[1]) then
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
  return pending and pending[2] == ARGV[5] and 1 or 0
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', 0, 'RETRYCOUNT', ARGV[4] - 1, 'JUSTID')
redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'suspect')
return 1
