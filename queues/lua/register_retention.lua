-- include: retention
-- Register a retention before records of the partition are kept for that long.
-- KEYS  retentions
-- ARGV  retention in milliseconds, milliseconds for which this registration is valid
-- returns  1
-- Idempotent. Atomicity is not needed. The first write frees memory, so that a full server accepts the rest (see
-- fence.lua).
redis.call('ZREM', KEYS[1], '')
register_retention(KEYS[1], ARGV[1], tonumber(ARGV[2]))
return 1
