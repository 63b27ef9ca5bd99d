-- Count a crash of a supervisor's worker, and pause the supervisor after too many crashes within the window.
-- KEYS  crashes, paused supervisors, pause
-- ARGV  supervisor, crashed worker, largest number of crashes that does not pause, window in milliseconds,
--       milliseconds for which a pause is kept without its supervisor, cause (the crash in words)
-- returns  {crashes within the window, time since which it is paused (0: it is not), cause of the pause}
-- Atomic: two supervisors of one name share the counter. Idempotent: a worker crashes once, and is counted once, also
-- where a report arrives after a resumption: the crash has the negative time as its score then.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[2], '')
redis.call('HEXISTS', KEYS[3], '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local start = now - tonumber(ARGV[4])
local new = redis.call('ZADD', KEYS[1], 'NX', now, ARGV[2]) == 1
redis.call('ZREMRANGEBYSCORE', KEYS[1], -start, start)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local crashes = redis.call('ZCOUNT', KEYS[1], 0, now)
if new and crashes > tonumber(ARGV[3]) and redis.call('HSETNX', KEYS[3], 'since', now) == 1 then
  redis.call('HSET', KEYS[3], 'why', ARGV[6], 'crashes', crashes)
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[5]), ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
end
local pause = redis.call('HMGET', KEYS[3], 'since', 'why')
return {crashes, tonumber(pause[1] or 0), pause[2] or ''}
