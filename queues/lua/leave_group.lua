-- Remove a worker from a partition: its consumer names are deleted, and messages that are still pending are released.
-- KEYS  ready stream, nudge stream, lock of the due set
-- ARGV  group, worker, consumer of released messages, their idle time in milliseconds
-- returns  the number of released messages; the worker has released those that it can read before (release.lua), so
--          that they count no crash
-- Atomic: a name is deleted only if nothing is pending on it, because deleting a consumer drops its pending list. The
-- first write changes nothing, and a full server accepts it; after it, the server accepts the rest (see fence.lua).
redis.call('XACK', KEYS[2], ARGV[1], '0-0')
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 10000, ARGV[2])
for i = 1, #pending do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, pending[i][1], 'IDLE', ARGV[4], 'JUSTID')
end
-- Nudge again for released messages: this worker may have consumed the nudge for them.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) > 0 then
  redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'released')
end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
-- Another worker must promote due tasks now, and not only after the TTL of the lock.
if redis.call('GET', KEYS[3]) == ARGV[2] then
  redis.call('DEL', KEYS[3])
  redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'due')
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[1], ARGV[2])
return #pending
