-- Set a queue's route if it is still the one that the caller has read.
-- KEYS  hash of queues
-- ARGV  queue, the route as it was read ('' for none), the new route
-- returns  1 the new route is set, 0 another one is
-- Atomic: compare and set, so that no two changes use the same indexes.
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if found == ARGV[3] then
  return 1
end
if found ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
