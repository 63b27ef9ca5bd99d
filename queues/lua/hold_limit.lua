-- include: limits
-- Hold a limit: nothing takes a token for some time. What holds one is not touched.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  limit, ms
-- returns  ms of Redis' clock until which it is held
-- Atomic: an earlier time never shortens a hold. Bytes that arrive late hold it for that much longer. The hash of a limit that
-- no worker has published has only its hold.
local where = TAG .. 'limit:' .. ARGV[1]
local ends = math.max(tonumber(redis.call('HGET', where, 'hold') or '') or 0, NOW + ARGV[2])
redis.call('HSET', where, 'hold', text(ends))
redis.call('PEXPIRE', where, text(math.max(KEPT, ends - NOW)))
return ends
