-- Take the quarantined message that has waited longest, to run its task alone.
-- KEYS  ready stream
-- ARGV  group, worker, consumer of quarantined messages
-- returns  nothing if there is no such message; else {entry (nil if it was deleted by hand), delivery count, fields,
--          1 if more are waiting}
-- Atomic: reads and takes in one act, so that no two workers take the same. Not to be repeated after a lost reply: the
-- message is this worker's then, and the worker recovers it (Consumer.recover_own).
local waiting = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 2, ARGV[3])
if waiting.err or not waiting[1] then
  return {}
end
local entry, count, more = waiting[1][1], waiting[1][4] + 1, waiting[2] and 1 or 0
local message = redis.call('XRANGE', KEYS[1], entry, entry)[1]
if not message then
  redis.call('XACK', KEYS[1], ARGV[1], entry)
  return {false, 0, {}, more}
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'RETRYCOUNT', count, 'JUSTID')
return {entry, count, message[2], more}
