-- Log that a person dismissed a finding of a coherence check.
-- KEYS  record, log
-- ARGV  event data (JSON)
-- returns  'missing', 'dismissed', or the state of a task that has ended and is no dead letter
-- Atomic: the log of a task that has expired is not created again. A repeated call logs the dismissal again, which
-- changes nothing.
local state = redis.call('HGET', KEYS[1], 'state')
if not state or redis.call('EXISTS', KEYS[2]) == 0 then
  return 'missing'
elseif state == 'succeeded' or state == 'cancelled' then
  return state
end
redis.call('XADD', KEYS[2], '*', 'type', 'dismissed', 'data', ARGV[1])
redis.call('PUBLISH', KEYS[1], 'dismissed')
return 'dismissed'
