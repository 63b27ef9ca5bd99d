-- Remove ids from the timeline whose record is gone, and renew the TTL of the timeline.
-- KEYS  timeline, then one record per id
-- ARGV  ids, in the order of the records
-- returns  the number of ids that were removed
-- Atomic per id: a task that takes the id again appears with its entry in the timeline, before or after this.
local gone = {}
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    gone[#gone + 1] = ARGV[i - 1]
  end
end
redis.call('PEXPIRE', KEYS[1], 2592000000)
return gone[1] and redis.call('ZREM', KEYS[1], unpack(gone)) or 0
