-- Check whether a closed partition has been empty long enough to be retired; then give its keys a TTL.
-- KEYS  ready stream, nudge stream, dead-letter stream, due set, mark of a closed partition
-- ARGV  longest retention of anything in it, in milliseconds
-- returns  1 it can be retired, 0 not yet
-- Atomic: check and mark in one act. Only a replay can add to a closed, empty partition, and there is no dead letter.
-- The mark outlives the partition, for producers that were away meanwhile.
if redis.call('HEXISTS', KEYS[5], 'last') == 0 then
  return 0
end
if redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[3]) + redis.call('ZCARD', KEYS[4]) > 0 then
  redis.call('HDEL', KEYS[5], 'empty')
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSETNX', KEYS[5], 'empty', now)
if now - redis.call('HGET', KEYS[5], 'empty') < tonumber(ARGV[1]) then
  return 0
end
redis.call('PEXPIRE', KEYS[1], 3600000)
redis.call('PEXPIRE', KEYS[2], 3600000)
redis.call('PEXPIRE', KEYS[3], 3600000)
redis.call('PEXPIRE', KEYS[5], math.max(3600000, tonumber(ARGV[1])))
return 1
