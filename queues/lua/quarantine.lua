-- include: fence
-- Sets a suspect aside, for a worker that runs it alone: it costs neither attempt nor crash.
-- KEYS  ready stream, nudge stream
-- ARGV  fence (4), consumer that holds suspects
-- returns  0 refused, the lease has passed; 1 set aside
-- Atomic: it stays pending, never in no place. Its idle time begins anew: where nobody runs suspects, any worker claims
-- it once a lease has passed. The delivery count goes back by the one that the next claim adds; see release.lua on why
-- no fence comes twice by that.
if not owned(KEYS[1]) then
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
  return pending and pending[2] == ARGV[5] and 1 or 0
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', 0, 'RETRYCOUNT', ARGV[4] - 1, 'JUSTID')
redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'suspect')
return 1
