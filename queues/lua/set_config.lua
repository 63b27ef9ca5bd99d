-- Store a setting that all workers of the namespace share, or remove it.
-- KEYS  stored settings
-- ARGV  name, value in seconds ('' removes the setting), milliseconds for which a change of the lease is in progress,
--       number of the last change as the caller has read it, 0 for none
-- returns  1 changed, 0 the settings were changed since they were read
-- Atomic: a changed lease appears with the leases that workers may still use meanwhile, those of an unfinished earlier
-- change included. Idempotent: the number tells whether this call has made the change already, and one that arrives late
-- replaces no later change.
local old, change = redis.call('HGET', KEYS[1], ARGV[1]) or '', tonumber(redis.call('HGET', KEYS[1], 'change') or 0)
if change == ARGV[4] + 1 and old == ARGV[2] then
  return 1
elseif change ~= tonumber(ARGV[4]) then
  return 0
end
if ARGV[1] == 'lease' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local low, high = tonumber(old), tonumber(old)
  local known = redis.call('HMGET', KEYS[1], 'lease_low', 'lease_high', 'lease_changed_at')
  if known[1] and tonumber(known[3]) > now then
    low = math.min(low or tonumber(known[1]), tonumber(known[1]))
    high = math.max(high or tonumber(known[2]), tonumber(known[2]))
  end
  redis.call('HDEL', KEYS[1], 'lease_low', 'lease_high')
  redis.call('HSET', KEYS[1], 'lease_changed_at', now + tonumber(ARGV[3]))
  if low then
    redis.call('HSET', KEYS[1], 'lease_low', low, 'lease_high', high)
  end
end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
redis.call('HSET', KEYS[1], 'change', change + 1)
return 1
