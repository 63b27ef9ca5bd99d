-- include: fence
-- Clears a suspect that has got further than any run before: what it crashed in company or unseen counts no more.
-- KEYS  ready stream, record, log
-- ARGV  fence (4), its crashes so far
-- returns  0 refused, the lease has passed; 1 cleared
-- Atomic: no longer a suspect in the act that excuses its crashes. Crashes that are known to be its own (guilty) stay
-- counted. Asked twice, it says the same once.
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
