-- The least that a fenced step record needs: the raw client's side of the step rate.
-- KEYS  ready stream, steps, log
-- ARGV  group, consumer, entry, step key, value
-- returns  0 the entry is not this consumer's, 1 stored
-- Atomic: the check and both writes.
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not pending or pending[2] ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
redis.call('XADD', KEYS[3], '*', 'type', 'step_completed', 'step', ARGV[4])
return 1
