-- Report that a worker died with a delivery: the task goes to quarantine, and can be taken at once.
-- KEYS  ready stream, record, log, nudge stream
-- ARGV  group, dead worker, entry, delivery count, consumer of quarantined messages, '1' if the worker held nothing
--       else, evidence of the crash (JSON; '' for a message that cannot be read: it has neither record nor log)
-- returns  1 quarantined now, 0 the delivery is not the dead worker's, or no longer
-- Atomic: a worker that sees the task quarantined sees the evidence, too. A single delivery is to blame: its count
-- stays, so that the next claim counts a crash, which is its own (field guilty). Of several deliveries, each may be
-- the cause: the counts are lowered by one, as if these deliveries had never happened. The dead worker's name is never
-- used again, so no fence can occur twice by that.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not (pending and pending[2] == ARGV[2] and tostring(pending[4]) == ARGV[4]) then
  return 0
end
local alone = ARGV[6] == '1'
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', 0,
  'RETRYCOUNT', alone and ARGV[4] or ARGV[4] - 1, 'JUSTID')
if ARGV[7] ~= '' then
  redis.call('HDEL', KEYS[2], 'step', 'alive')
  redis.call('HSET', KEYS[2], 'suspect', alone and 'alone' or 'company', 'crash', ARGV[7])
  if alone then
    redis.call('HSET', KEYS[2], 'guilty', (redis.call('HGET', KEYS[2], 'crashes') or 0) + ARGV[4]
      - (redis.call('HGET', KEYS[2], 'returned') or 0))
  end
  redis.call('XADD', KEYS[3], '*', 'type', 'crashed', 'data', ARGV[7])
  redis.call('PUBLISH', KEYS[2], 'crashed')
end
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'suspect')
return 1
