-- include: fence
-- Raise the delivery count of a delivery that this worker has already, so that a new run has a fence of its own.
-- KEYS  ready stream, record
-- ARGV  fence (4)
-- returns  0 refused, the lease has passed; 1 raised; 2 it was raised before
-- Atomic: the former fence ends in the script that creates the new one, and the former delivery counts as returned.
-- Idempotent: after a lost reply, the count shows that it was raised.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not (pending and pending[2] == ARGV[2]) then
  return 0
end
if pending[4] == ARGV[4] + 1 then
  return 2
end
if not owned(KEYS[1]) then
  return 0
end
-- a key of another type ends the script here, before its first write
redis.call('HEXISTS', KEYS[2], '')
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4] + 1, 'JUSTID')
count_returned(KEYS[2])
return 1
