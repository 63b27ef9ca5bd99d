-- include: fence
-- Store which step is running, and that it is alive.
-- KEYS  ready stream, record
-- ARGV  fence (4), step key, number of the run's last entry at that time
-- returns  0 refused, the lease has passed; 1 stored, or too late: the run has written something since
if not owned(KEYS[1]) then
  return 0
end
if tonumber(redis.call('HGET', KEYS[2], 'entries') or 0) <= tonumber(ARGV[6]) then
  redis.call('HSET', KEYS[2], 'step', ARGV[5], 'alive', now_ms())
  redis.call('PUBLISH', KEYS[2], 'alive')
end
return 1
