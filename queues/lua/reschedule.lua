-- include: fence
-- Settle a delivery by putting the task into the due set, to run again after a delay.
-- KEYS  ready stream, record, due set, nudge stream, log, control, steps
-- ARGV  fence (4), last entry (see gap), task id, attempts, crashes, returns, delay in milliseconds, event type, event
--       data (JSON), then the changes of the checkpoint for the next attempt (see end_attempt)
-- returns  0 refused, the lease has passed; 1 settled; -1 - N refused, see gap
-- Atomic: the task is due or pending, never both, never neither. Its payload is in the record.
-- A log without an id left (hence pcall) does not make a settled delivery fail.
-- If its cancellation was requested, the task is due at once: the next worker cancels it, whatever the delay was. One that
-- a worker has returned, since only others know its clean-up task, waits for them.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
local due = now_ms()
if ARGV[11] == 'returned' or redis.call('HEXISTS', KEYS[6], 'cancel') == 0 then
  due = due + tonumber(ARGV[10])
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[5], '0-0', '0-0')
if ARGV[13] then
  redis.call('HEXISTS', KEYS[7], '')
end
begin_outcome(KEYS[1], KEYS[2])
put_off(KEYS[3], KEYS[4], KEYS[2], ARGV[6], due)
close(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'worker', ARGV[2],
  'attempts', ARGV[7], 'crashes', ARGV[8], 'returns', ARGV[9], 'error', ARGV[12])
redis.call('HDEL', KEYS[2], 'waits', 'wakes')
redis.pcall('XADD', KEYS[5], '*', 'type', ARGV[11], 'data', ARGV[12])
redis.call('PUBLISH', KEYS[2], ARGV[11])
end_attempt(KEYS[2], KEYS[7], 13, nil)
return 1
