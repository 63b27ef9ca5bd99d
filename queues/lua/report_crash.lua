-- Reports that a worker died with a delivery: it is set aside for a worker that runs it alone, and can be taken at once.
-- KEYS  ready stream, record, log, nudge stream
-- ARGV  group, dead worker, entry, delivery count, consumer that holds suspects, '1' where it held nothing else,
--       what is known of the crash (JSON; '' for a message that cannot be read: it has neither record nor log)
-- returns  1 set aside now, 0 it is not, or no longer, the dead worker's
-- Atomic: who sees it set aside sees why. A single delivery is to blame: its count stays, so that the next claim
-- counts a crash, for good (guilty). Of several, any one may have been the cause: the count goes back by one, as if this
-- delivery had never been. The dead worker's name is never used again, so no fence can come twice by that.
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
    redis.call('HSET', KEYS[2], 'guilty', (redis.call('HGET', KEYS[2], 'crashes') or 0) + ARGV[4])
  end
  redis.call('XADD', KEYS[3], '*', 'type', 'crashed', 'data', ARGV[7])
  redis.call('PUBLISH', KEYS[2], 'crashed')
end
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'suspect')
return 1
