-- include: seen
-- Renew the leases of one worker on one partition, and store what its runs do.
-- KEYS  ready stream, seen, then record and control hash of each delivery's task
-- ARGV  group, worker, lease in milliseconds, consumer of released messages, then five of each delivery: entry, delivery
--       count, milliseconds since its run began ('': it has not, and nothing is stored), key of the step that it is in
--       ('': none), milliseconds since that began
-- returns  {touch (see seen.lua), positions (from 0) of lost deliveries, positions of deliveries whose cancellation was
--          requested}
-- Atomic per delivery: it is renewed only if it is this worker's, with this count; JUSTID leaves the count as it is. An
-- emptied server has no group (hence pcall): then every delivery is lost. A record or control hash of another type
-- (pcall again) costs no other task its lease; the script that settles the task moves it. What a run does is seen from outside only; the
-- next heartbeat corrects what a late command has stored. A missing record stays missing: it would have no TTL.
local touched = touch(KEYS[2], KEYS[1], ARGV[1], tonumber(ARGV[3]), ARGV[4])
local lost, cancelled = {}, {}
for i = 3, #KEYS, 2 do
  local position = (i - 3) / 2
  local entry, count, ran, step, stepped = unpack(ARGV, position * 5 + 5, position * 5 + 9)
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)[1]
  if pending and pending[2] == ARGV[2] and tostring(pending[4]) == count then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID')
    if ran ~= '' and redis.pcall('HEXISTS', KEYS[i], 'state') == 1 then
      redis.call('HSET', KEYS[i], 'run', count, 'began', touched[1] - ran, 'alive', touched[1])
      if step ~= '' then
        redis.call('HSET', KEYS[i], 'step', step, 'step_at', touched[1] - stepped)
      else
        redis.call('HDEL', KEYS[i], 'step', 'step_at')
      end
    end
    if redis.pcall('HEXISTS', KEYS[i + 1], 'cancel') == 1 then
      cancelled[#cancelled + 1] = position
    end
  else
    lost[#lost + 1] = position
  end
end
return {touched, lost, cancelled}
