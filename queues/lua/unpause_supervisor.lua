-- Lift a supervisor's pause and delete its crashes.
-- KEYS  crashes, paused supervisors, pause
-- ARGV  supervisor
-- returns  1 it was paused, 0 it was not
-- Atomic: a crash is counted before or after, and never pauses because of deleted crashes. Idempotent.
local paused = redis.call('DEL', KEYS[3])
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return paused
