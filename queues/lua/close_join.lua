-- Close a join: first launch nothing more, then delete it.
-- KEYS  join, its open children, its children that are not launched, joins
-- ARGV  `PARENT:GROUP`, '1' to delete it
-- returns  1 done, 0 there is no such join
-- Atomic: no notice that arrives between the two calls opens another child. Idempotent.
local known = redis.call('HEXISTS', KEYS[1], 'total')
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[4], '')
redis.call('UNLINK', KEYS[3])
if ARGV[2] == '1' then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[4], ARGV[1])
elseif known == 1 then
  redis.call('HSET', KEYS[1], 'closed', '1')
end
return known
