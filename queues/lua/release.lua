-- include: fence
-- Release a delivery, so that another worker takes it at once. Costs neither an attempt nor a crash.
-- KEYS  ready stream, record, log, nudge stream
-- ARGV  fence (4), last entry (see gap), consumer of released messages, the idle time that the message shows then, in
--       milliseconds, event type ('' for a delivery that never started: nothing is logged), event data (JSON)
-- returns  0 refused, the lease has passed; 1 released; -1 - N refused, see gap
-- Atomic: the message stays in the pending list, so it is never in no place. The delivery count stays: the next claim
-- raises it, so that this fence never occurs again, and field `returned` says that this delivery was no crash.
-- A log without an id left (hence pcall) does not keep the nudge from other workers.
-- Idempotent: field `released` shows, also after the next claim, that this delivery was released.
local function released()
  if redis.call('HGET', KEYS[2], 'released') == ARGV[2] .. ' ' .. fence_text() then
    return true
  end
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
  return pending and pending[2] == ARGV[6] and tostring(pending[4]) == ARGV[4]
end

if not owned(KEYS[1]) then
  return released() and 1 or 0
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
-- a key of another type ends the script here, before its first write
redis.call('HEXISTS', KEYS[2], '')
redis.call('XRANGE', KEYS[3], '0-0', '0-0')
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[6], 0, ARGV[3], 'IDLE', ARGV[7], 'JUSTID')
if count_returned(KEYS[2]) then
  redis.call('HSET', KEYS[2], 'released', ARGV[2] .. ' ' .. fence_text())
end
if ARGV[8] ~= '' then
  redis.call('HDEL', KEYS[2], 'run', 'began', 'alive', 'step', 'step_at')
  redis.pcall('XADD', KEYS[3], '*', 'type', ARGV[8], 'data', ARGV[9])
  redis.call('PUBLISH', KEYS[2], ARGV[8])
end
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'released')
return 1
