-- Store where children of a join are.
-- KEYS  join
-- ARGV  id and place of each child
-- returns  1 stored, 0 there is no such join any more
-- Atomic: a join that was deleted is not created again. Idempotent. The first write frees memory (see fence.lua).
if redis.call('HEXISTS', KEYS[1], 'total') == 0 then
  return 0
end
for i = 1, #ARGV, 2 do
  redis.call('HDEL', KEYS[1], 'l:' .. ARGV[i])
  redis.call('HSET', KEYS[1], 'p:' .. ARGV[i], ARGV[i + 1])
end
return 1
