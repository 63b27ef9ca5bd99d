-- Add a worker to the members that share a queue's partitions, and return the members.
-- KEYS  members of the queue
-- ARGV  worker, milliseconds of silence after which a member is removed, milliseconds for which one that left is marked
-- returns  the members, in no particular order
-- Idempotent. Atomic: a call that arrives after the worker has left does not add it again. The mark of one that has left
-- is its member with the negative time as its score. The first write needs no memory, so that a full server accepts the
-- rest (see fence.lua). A member in the future was not written by a worker.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if not score or tonumber(score) > 0 then
  redis.call('ZADD', KEYS[1], now, ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], -(now - ARGV[3]), now - ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, '+inf')
