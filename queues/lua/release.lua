-- include: fence
-- Release a delivery, so that another worker takes it at once. Costs neither an attempt nor a crash.
-- KEYS  ready stream, record, log, nudge stream
-- ARGV  fence (4), consumer of released messages, the idle time that the message shows then, in milliseconds, event
--       type ('' for a delivery that never started: neither record nor log is touched), event data (JSON)
-- returns  0 refused, the lease has passed; 1 released
-- Atomic: the message stays in the pending list, so it is never in no place. The delivery count is lowered by the one
-- that the next claim adds. No fence can occur twice by that: only the run that held it lowers the count, and that run
-- has ended; what a lost lease has raised stays raised. Only the same worker may get the same fence again, so the
-- release is stored in a field of its own: other scripts of that later delivery must not take it for theirs.
local function given_back()
  if ARGV[7] ~= '' then
    return redis.call('HGET', KEYS[2], 'released') == ARGV[2] .. ' ' .. fence_text()
  end
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
  return pending and pending[2] == ARGV[5]
end

if not owned(KEYS[1]) then
  return given_back() and 1 or 0
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', ARGV[6], 'RETRYCOUNT', ARGV[4] - 1, 'JUSTID')
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[2], 'released', ARGV[2] .. ' ' .. fence_text())
  redis.call('HDEL', KEYS[2], 'step', 'alive')
  redis.call('XADD', KEYS[3], '*', 'type', ARGV[7], 'data', ARGV[8])
  redis.call('PUBLISH', KEYS[2], ARGV[7])
end
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'why', 'released')
return 1
