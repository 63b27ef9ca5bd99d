-- Set a queue's route if it is still the one that the caller has read.
-- KEYS  hash of queues, hash of the deployment
-- ARGV  queue, the route as it was read ('' for none), the new route, format of the stored data
-- returns  1 the new route is set, 0 another one is
-- Atomic: compare and set, so that no two changes use the same indexes. The first route of a namespace is stored with
-- the format of its data: a process that does not know the format refuses to work with the namespace.
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if found == ARGV[3] then
  return 1
end
if found ~= ARGV[2] then
  return 0
end
local known = redis.call('HGET', KEYS[2], 'format')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if not known then
  redis.call('HSET', KEYS[2], 'format', ARGV[4])
end
return 1
