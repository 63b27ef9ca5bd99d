-- Log that a person dismissed a finding of a coherence check.
-- KEYS  record, log
-- ARGV  event data (JSON), id of the finding's entry in the log, number of replays as the caller has read it ('' for none)
-- returns  'missing', 'dismissed', the state of a task that has ended and is no dead letter, or 'changed': the finding is
--          not of this run
-- Atomic: the log of a task that has expired is not created again, and a call that arrives late dismisses no finding of a
-- task that was enqueued again under the same id, or replayed, since. A repeated call logs the dismissal again, which
-- changes nothing.
local state, replays = unpack(redis.call('HMGET', KEYS[1], 'state', 'replays'))
if not state or redis.call('EXISTS', KEYS[2]) == 0 then
  return 'missing'
elseif state == 'succeeded' or state == 'cancelled' then
  return state
elseif (replays or '') ~= ARGV[3] or #redis.call('XRANGE', KEYS[2], ARGV[2], ARGV[2]) == 0 then
  return 'changed'
end
redis.call('XADD', KEYS[2], '*', 'type', 'dismissed', 'data', ARGV[1])
redis.call('PUBLISH', KEYS[1], 'dismissed')
return 'dismissed'
