-- Check whether no record of a closed partition can exist any more; then give its keys a TTL.
-- KEYS  ready stream, nudge stream, dead letters, due set, closed mark, retentions, timeline, outbox, joins, rings
-- ARGV  milliseconds for which the mark outlives the partition
-- returns  1 it can be retired, 0 not yet
-- Atomic: check and mark in one act. Only a replay can add to a closed, empty partition, and there is no dead letter:
-- since the partition is empty, no record was stored or given another TTL: an ended task that gets one later is in the
-- outbox until then. Each record that still exists was kept for a retention that is registered here, from a time before
-- the partition was empty, and before the retention was used last. A partition with a join has a live parent.
-- A retention that is no number is of another program (retention.lua). The mark outlives the partition, for producers that
-- were away meanwhile.
if redis.call('HEXISTS', KEYS[5], 'last') == 0 then
  return 0
end
if redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[3]) + redis.call('ZCARD', KEYS[4])
  + redis.call('ZCARD', KEYS[8]) + redis.call('ZCARD', KEYS[9]) + redis.call('ZCARD', KEYS[10]) > 0 then
  redis.call('HDEL', KEYS[5], 'empty')
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSETNX', KEYS[5], 'empty', now)
local empty = tonumber(redis.call('HGET', KEYS[5], 'empty'))
local found = redis.call('ZRANGE', KEYS[6], 0, -1, 'WITHSCORES')
for i = 1, #found, 2 do
  local kept = #found[i] <= 15 and string.match(found[i], '^%d+$') or 0
  if math.min(tonumber(found[i + 1]), empty) + kept > now then
    return 0
  end
end
redis.call('PEXPIRE', KEYS[1], 3600000)
redis.call('PEXPIRE', KEYS[2], 3600000)
redis.call('PEXPIRE', KEYS[3], 3600000)
redis.call('PEXPIRE', KEYS[7], 3600000)
redis.call('PEXPIRE', KEYS[5], ARGV[1])
return 1
