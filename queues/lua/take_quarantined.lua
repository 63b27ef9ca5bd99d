-- Takes the suspect that has waited longest, to run it alone.
-- KEYS  ready stream
-- ARGV  group, worker, consumer that holds suspects
-- returns  nothing where there is none; else {entry (nil where its message was deleted by hand), delivery count, fields,
--          1 where more are waiting}
-- Atomic: looks and takes in one, so no two workers take the same. Not to be asked again when the reply was lost: the
-- suspect is this worker's by then, and found there by whoever looks what is (Consumer.adopt).
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
