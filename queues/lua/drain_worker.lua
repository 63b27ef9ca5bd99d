-- Ask a worker to take no more tasks, to finish what it runs, and to stop.
-- KEYS  its hash
-- ARGV  who asks
-- returns  1 asked now, 2 it was asked before, 0 it is not registered, -1 it is of an earlier version, which does not follow
-- Atomic: no hash without a TTL is created for a worker that has left or expired meanwhile. Idempotent: the first request
-- stays. The registration of the worker keeps the fields, and returns that there are any (register_worker.lua).
if redis.call('HEXISTS', KEYS[1], 'left') == 1 or redis.call('HEXISTS', KEYS[1], 'id') == 0 then
  return 0
elseif redis.call('HEXISTS', KEYS[1], 'draining') == 0 then
  return -1
elseif redis.call('HEXISTS', KEYS[1], 'drain') == 1 then
  return 2
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'drain', time[1] * 1000 + math.floor(time[2] / 1000), 'drain_by', ARGV[1])
return 1
