-- include: fence
-- Gives a delivery back, so that another worker takes it at once and it costs neither attempt nor crash.
-- KEYS  ready stream, record, log, nudge stream
-- ARGV  fence (4), name of the consumer that holds what was given back, idle time it then shows in milliseconds,
--       event type ('' for a delivery that never started: nothing is logged), event data (JSON)
-- returns  0 refused, the lease has passed; 1 given back
-- The message stays in the pending list, so it is never in no place. Its delivery count goes back by the one that
-- the next claim adds. A fence cannot come twice by that: only the run that held it lowers the count, and that
-- run has ended; what a lost lease had raised stays raised.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', ARGV[6], 'RETRYCOUNT', ARGV[4] - 1, 'JUSTID')
redis.call('HSET', KEYS[2], 'settled', fence_text())
redis.call('HDEL', KEYS[2], 'step', 'alive')
if ARGV[7] ~= '' then
  redis.call('XADD', KEYS[3], '*', 'type', ARGV[7], 'data', ARGV[8])
  redis.call('PUBLISH', KEYS[2], ARGV[7])
end
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'released')
return 1
