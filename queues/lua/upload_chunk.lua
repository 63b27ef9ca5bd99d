-- Store a chunk of large arguments, before the task that they belong to.
-- KEYS  upload
-- ARGV  field, chunk, milliseconds until the upload expires
-- returns  1
-- Atomic: no chunk is stored without a TTL, so that nothing is left of a producer that dies before it stores the task.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
