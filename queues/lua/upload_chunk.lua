-- Store fields of a task that is not stored yet, such as a chunk of large arguments.
-- KEYS  upload
-- ARGV  milliseconds until the upload expires, then fields and values
-- returns  1
-- Atomic: nothing is stored without a TTL, so that nothing is left of a caller that dies before it stores the task.
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
