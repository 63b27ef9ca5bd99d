-- Close a join: first launch nothing more, then delete it.
-- KEYS  join, its open children, its children that are not launched, joins
-- ARGV  `PARENT:GROUP`; 'close', 'delete', or 'clear' to remove what is left of one whose hash is gone; milliseconds for which
--       children that are added late are refused
-- returns  1 done, 0 there is no such join; 2 nothing was done: a join that is not closed is not deleted, since Redis has lost
--          that it was, and perhaps that its children were cancelled
-- Atomic: no notice that arrives between the two calls opens another child. Idempotent. Of a join that was deleted, the list
-- of children stays for a while, with one entry: children that are added late would create the join again. The first
-- write frees memory (see fence.lua).
local known = redis.call('HEXISTS', KEYS[1], 'total')
-- a key of another type ends the script here, before its first write
redis.call('LLEN', KEYS[3])
if known == 1 and ARGV[2] == 'delete' and redis.call('HEXISTS', KEYS[1], 'closed') == 0 then
  return 2
end
redis.call('ZREM', KEYS[4], known == 1 and ARGV[2] ~= 'delete' and '' or ARGV[1])
if known == 0 then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
elseif ARGV[2] == 'delete' then
  redis.call('RPUSH', KEYS[3], 'closed')
  redis.call('LTRIM', KEYS[3], -1, -1)
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
  redis.call('UNLINK', KEYS[1], KEYS[2])
elseif ARGV[2] == 'close' then
  redis.call('HSET', KEYS[1], 'closed', '1')
end
return known
