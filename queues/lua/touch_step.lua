-- include: fence
-- Store which step is running, and that it is alive.
-- KEYS  ready stream, record
-- ARGV  fence (4), step key
-- returns  0 refused, the lease has passed; 1 stored
if not owned(KEYS[1]) then
  return 0
end
redis.call('HSET', KEYS[2], 'step', ARGV[5], 'alive', now_ms())
redis.call('PUBLISH', KEYS[2], 'alive')
return 1
