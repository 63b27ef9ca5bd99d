-- Store a setting that all workers of the namespace share, or remove it.
-- KEYS  stored settings
-- ARGV  name, value in seconds ('' removes the setting), milliseconds for which a change of the lease is in progress
-- returns  1 changed, 0 it was so before
-- Atomic: a changed lease appears with the leases that workers may still use meanwhile, those of an unfinished earlier
-- change included.
local old = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if old == ARGV[2] then
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
return 1
