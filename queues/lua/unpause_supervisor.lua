-- Lifts a supervisor's pause and forgets its crashes.
-- KEYS  crashes, paused supervisors, pause
-- ARGV  supervisor
-- returns  1 it was paused, 0 it was not
-- Atomic: a crash is counted before or after, and never pauses by what was forgotten. Asked twice, it changes nothing
-- more, and answers 0.
local paused = redis.call('DEL', KEYS[3])
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return paused
