-- Store a chunk of the large result of a child, before its notice.
-- KEYS  join, its open children
-- ARGV  id of the child, field, chunk
-- returns  1 stored, 0 the join does not wait for the child
-- Atomic: a join that was deleted is not created again. Idempotent.
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'total') == 0 then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return 1
