-- Renew the leases of one worker on one partition.
-- KEYS  ready stream, then the control hash of each delivery's task
-- ARGV  group, worker, then entry and delivery count of each delivery
-- returns  {positions (from 0) of lost deliveries, positions of deliveries whose cancellation was requested}
-- A delivery is renewed only if it is this worker's, with this count; JUSTID leaves the count as it is. An emptied
-- server has no group (hence pcall): then every delivery is lost.
local lost, cancelled = {}, {}
for i = 2, #KEYS do
  local entry, count = ARGV[(i - 2) * 2 + 3], ARGV[(i - 2) * 2 + 4]
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)[1]
  if pending and pending[2] == ARGV[2] and tostring(pending[4]) == count then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID')
    if redis.call('HEXISTS', KEYS[i], 'cancel') == 1 then
      cancelled[#cancelled + 1] = i - 2
    end
  else
    lost[#lost + 1] = i - 2
  end
end
return {lost, cancelled}
