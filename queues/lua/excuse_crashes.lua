-- include: fence
-- Excuse the crashes of a task that has recorded what no earlier run had recorded: they no longer count in a row. They
-- count within a window, whose limit is far higher.
-- KEYS  ready stream, record, log
-- ARGV  fence (4), number of its crashes so far, window in milliseconds
-- returns  0 refused, the lease has passed; 1 excused
-- Atomic: a crash counts either in a row or in the window. Idempotent: a second call changes nothing. A window starts
-- with the first crash that is excused after the last one has ended.
if not owned(KEYS[1]) then
  return 0
end
local known = redis.call('HMGET', KEYS[2], 'excused', 'recent_at')
local more = tonumber(ARGV[5]) - tonumber(known[1] or 0)
if more > 0 then
  local now = now_ms()
  if now - tonumber(known[2] or 0) > tonumber(ARGV[6]) then
    redis.call('HSET', KEYS[2], 'recent', 0, 'recent_at', now)
  end
  redis.call('HINCRBY', KEYS[2], 'recent', more)
  redis.call('HSET', KEYS[2], 'excused', ARGV[5])
  redis.call('XADD', KEYS[3], '*', 'type', 'cleared', 'data', '{"excused":' .. ARGV[5] .. '}')
end
return 1
