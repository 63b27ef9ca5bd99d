-- A worker's last act on a partition: what is still pending on it goes back, and its name goes away.
-- KEYS  ready stream, nudge stream, watch
-- ARGV  group, worker, consumer that holds what was given back, idle time in milliseconds
-- returns  how many messages were given back
-- Atomic: the name is deleted only when nothing is pending on it, since deleting a consumer drops its pending list.
-- A write that changes nothing, and one that a full server takes; after it, it takes the others as well (see fence.lua).
redis.call('XACK', KEYS[2], ARGV[1], '0-0')
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 10000, ARGV[2])
for i = 1, #pending do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, pending[i][1],
    'IDLE', ARGV[4], 'RETRYCOUNT', pending[i][4] - 1, 'JUSTID')
end
-- Whatever waits there is announced again: the leaving worker may have taken the announcement with it.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) > 0 then
  redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'released')
end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
-- Somebody else must watch the due set now, and not only when this worker's time is over.
if redis.call('GET', KEYS[3]) == ARGV[2] then
  redis.call('DEL', KEYS[3])
  redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'due')
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[1], ARGV[2])
return #pending
