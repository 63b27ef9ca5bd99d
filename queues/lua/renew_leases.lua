-- include: seen
-- Renew the leases of one worker on one partition.
-- KEYS  ready stream, seen, then the control hash of each delivery's task
-- ARGV  group, worker, lease in milliseconds, consumer of released messages, then entry and delivery count of each
--       delivery
-- returns  {touch (see seen.lua), positions (from 0) of lost deliveries, positions of deliveries whose cancellation was
--          requested}
-- Atomic per delivery: it is renewed only if it is this worker's, with this count; JUSTID leaves the count as it is. An
-- emptied server has no group (hence pcall): then every delivery is lost.
local touched = touch(KEYS[2], KEYS[1], ARGV[1], tonumber(ARGV[3]), ARGV[4])
local lost, cancelled = {}, {}
for i = 3, #KEYS do
  local entry, count = ARGV[(i - 3) * 2 + 5], ARGV[(i - 3) * 2 + 6]
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)[1]
  if pending and pending[2] == ARGV[2] and tostring(pending[4]) == count then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID')
    if redis.call('HEXISTS', KEYS[i], 'cancel') == 1 then
      cancelled[#cancelled + 1] = i - 3
    end
  else
    lost[#lost + 1] = i - 3
  end
end
return {touched, lost, cancelled}
