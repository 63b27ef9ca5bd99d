-- Remove the consumer names of a dead worker if nothing is pending on it.
-- KEYS  ready stream, nudge stream
-- ARGV  group, worker
-- returns  1 removed, 0 a message is pending on it
-- Atomic: deleting a consumer drops its pending list, so check and deletion must be one act.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[1], ARGV[2])
return 1
