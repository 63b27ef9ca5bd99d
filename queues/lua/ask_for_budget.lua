-- Let a task wait for a budget, and tell whether it is the one that asks a person.
-- KEYS  ledger, tasks that wait for the budget
-- ARGV  waiter, milliseconds after which a task that has not called again is presumed not to wait, number of the raises as
--       the caller has read it
-- returns  1 it asks, 0 another one does, -1 the budget was raised since the caller has read it, or there is no ledger
-- Atomic: one task asks at a time. Idempotent: the one that asks stays the one. It loses that to the next caller once it has
-- not called for the time; bytes that arrive late add a waiter at most, which is presumed gone after the time.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored = redis.call('HMGET', KEYS[1], 'number', 'asker')
redis.call('ZSCORE', KEYS[2], '')
if stored[1] ~= ARGV[3] then
  return -1
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', now - ARGV[2]))
local asks = not stored[2] or stored[2] == ARGV[1] or not redis.call('ZSCORE', KEYS[2], stored[2])
redis.call('ZADD', KEYS[2], string.format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if asks then
  redis.call('HSET', KEYS[1], 'asker', ARGV[1])
end
return asks and 1 or 0
