-- Says that a worker takes its share of a queue's partitions, and who else does.
-- KEYS  sharers of the queue
-- ARGV  worker, milliseconds after which a silent one counts as gone
-- returns  the workers that share the queue, in no particular order
-- Atomic only as a matter of course: said twice, it says the same. What frees memory comes first, so that a full server
-- lets the rest through (see fence.lua).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZRANGE', KEYS[1], 0, -1)
