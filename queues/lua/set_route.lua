-- Changes a queue's route, if it is still what the caller has read.
-- KEYS  hash of queues
-- ARGV  queue, the route as it was read ('' for none), the route that takes its place
-- returns  1 where the new route stands there now, 0 where another one does
-- Atomic: looks and writes in one, so no two changes can take the same indexes.
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if found == ARGV[3] then
  return 1
end
if found ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
