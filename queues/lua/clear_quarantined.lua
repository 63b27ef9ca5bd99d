-- include: fence
-- Clear a quarantined task that has progressed further than any run before: crashes that may be another task's fault
-- are forgiven.
-- KEYS  ready stream, record, log
-- ARGV  fence (4), number of its crashes so far
-- returns  0 refused, the lease has passed; 1 cleared
-- Atomic: the task leaves quarantine in the script that forgives its crashes. Crashes that are known to be its own
-- stay counted (field guilty). Idempotent: a second call logs nothing.
if not owned(KEYS[1]) then
  return 0
end
local excused = tonumber(ARGV[5]) - tonumber(redis.call('HGET', KEYS[2], 'guilty') or 0)
local suspect = redis.call('HDEL', KEYS[2], 'suspect')
if suspect == 1 or excused > tonumber(redis.call('HGET', KEYS[2], 'excused') or 0) then
  redis.call('HSET', KEYS[2], 'excused', excused)
  redis.call('XADD', KEYS[3], '*', 'type', 'cleared', 'data', '{"excused":' .. excused .. '}')
end
return 1
