-- Register a supervisor, and return its crash count and pause.
-- KEYS  supervisors, the supervisor, its crashes, paused supervisors, its pause
-- ARGV  id, name, its description (JSON), then in milliseconds: silence after which it is removed, window of crashes,
--       retention of a pause without its supervisor
-- returns  {crashes within the window, time since which it is paused (0: it is not), cause of the pause}
-- Idempotent. Atomic: a registration that arrives after the supervisor has left, which its hash says, does not list it
-- again. Crashes before its last resumption have the negative time as their score, see unpause_supervisor.lua. Members in
-- the future are not of Perdure, or the clock was set back: a supervisor lists itself again at its next registration.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = redis.call('HEXISTS', KEYS[2], 'left') == 1
if not left then
  redis.call('HSET', KEYS[2], 'told', ARGV[3], 'seen', now)
  redis.call('HSETNX', KEYS[2], 'started', now)
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  redis.call('ZADD', KEYS[1], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[4]))
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
local start = now - tonumber(ARGV[5])
local crashes = redis.call('ZCOUNT', KEYS[3], '(' .. start, now)
redis.call('ZREMRANGEBYSCORE', KEYS[3], -start, start)
local pause = redis.call('HMGET', KEYS[5], 'since', 'why')
if pause[1] and not left then
  redis.call('PEXPIRE', KEYS[5], ARGV[6])
  redis.call('ZADD', KEYS[4], now + tonumber(ARGV[6]), ARGV[2])
  redis.call('PEXPIRE', KEYS[4], ARGV[6])
end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[4], '(' .. now + tonumber(ARGV[6]), '+inf')
return {crashes, tonumber(pause[1] or 0), pause[2] or ''}
