-- Report that a worker died with a delivery: any worker may claim it at once.
-- KEYS  ready stream, record, log, nudge stream
-- ARGV  group, dead worker, entry, delivery count, consumer of released messages, the idle time that the message shows
--       then, in milliseconds, evidence of the crash (JSON; '' for a message that cannot be read: it has neither record
--       nor log)
-- returns  1 released now, 0 the delivery is not the dead worker's, or no longer
-- Atomic: a worker that claims the task sees the evidence, too. The delivery count stays, so that the next claim counts
-- a crash.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not (pending and pending[2] == ARGV[2] and tostring(pending[4]) == ARGV[4]) then
  return 0
end
-- a key of another type ends the script here, before its first write
redis.call('HEXISTS', KEYS[2], '')
redis.call('XRANGE', KEYS[3], '0-0', '0-0')
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', ARGV[6], 'JUSTID')
if ARGV[7] ~= '' then
  redis.call('HDEL', KEYS[2], 'run', 'began', 'alive', 'step', 'step_at')
  redis.call('HSET', KEYS[2], 'crash', ARGV[7])
  redis.call('XADD', KEYS[3], '*', 'type', 'crashed', 'data', ARGV[7])
  redis.call('PUBLISH', KEYS[2], 'crashed')
end
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'released')
return 1
