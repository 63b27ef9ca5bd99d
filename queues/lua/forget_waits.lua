-- Remove a task that has ended from the index of open waits.
-- KEYS  index of tasks with open waits, record, inbox
-- ARGV  task id
-- returns  1 if it was removed; 0 if it was not in the index, or may still be waiting
-- Atomic: a task that was enqueued again under its id since, and waits, stays. A dead letter stays: it may be replayed.
local state = redis.call('HGET', KEYS[2], 'state')
local over = not state or state == 'succeeded' or state == 'cancelled'
if not over and (redis.call('HGET', KEYS[3], 'open') or '0') ~= '0' then
  return 0
end
return redis.call('ZREM', KEYS[1], ARGV[1])
