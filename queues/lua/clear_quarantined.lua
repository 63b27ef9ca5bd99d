-- include: fence
-- End the quarantine of a task that has run for the probation time: from now on it is an ordinary task.
-- KEYS  ready stream, record
-- ARGV  fence (4)
-- returns  0 refused, the lease has passed; 1 cleared
-- Idempotent. Its crashes stay counted until it makes progress (write_checkpoint.lua).
if not owned(KEYS[1]) then
  return 0
end
redis.call('HDEL', KEYS[2], 'suspect')
return 1
