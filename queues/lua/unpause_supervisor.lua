-- Lift a supervisor's pause, and count its crashes no longer.
-- KEYS  crashes, paused supervisors, pause
-- ARGV  supervisor, time since which it is paused, as the caller has read it
-- returns  1 the pause is lifted, 0 it was lifted before, or another one began since
-- Atomic: a crash is counted before or after, and never pauses because of earlier crashes. Idempotent: a call that arrives
-- late lifts no later pause. The crashes stay in the set, with the negative time as their score, so that a report of one
-- of them that arrives late does not count it again.
if redis.call('HGET', KEYS[3], 'since') ~= ARGV[2] then
  return 0
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[1], '')
redis.call('ZSCORE', KEYS[2], '')
redis.call('DEL', KEYS[3])
local crashes = redis.call('ZRANGEBYSCORE', KEYS[1], 0, '+inf', 'WITHSCORES')
for i = 1, #crashes, 2 do
  redis.call('ZADD', KEYS[1], -crashes[i + 1], crashes[i])
end
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
