-- Note in the record of a continued task that its successor was read by a worker, or cancelled.
-- KEYS  record of the continued task
-- ARGV  source of the successor (id of the continued task, and a token)
-- returns  1 noted, 0 there is no such record any more
-- Atomic: a record that has expired is not created again. Idempotent.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[1], 'continued', ARGV[1])
return 1
