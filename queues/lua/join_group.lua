-- Add a worker to the members that share a queue's partitions, and return the members.
-- KEYS  members of the queue, mark of a worker that has left them
-- ARGV  worker, milliseconds of silence after which a member is removed
-- returns  the members, in no particular order
-- Idempotent. Atomic: a call that arrives after the worker has left does not add it again. The first write needs no
-- memory, so that a full server accepts the rest (see fence.lua).
if redis.call('EXISTS', KEYS[2]) == 1 then
  return redis.call('ZRANGE', KEYS[1], 0, -1)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZRANGE', KEYS[1], 0, -1)
