-- Removes the name of a worker that is gone, where it holds nothing.
-- KEYS  ready stream, nudge stream
-- ARGV  group, worker
-- returns  1 removed, 0 something is pending on it
-- Atomic: deleting a consumer drops its pending list, so looking and deleting must be one act.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[1], ARGV[2])
return 1
