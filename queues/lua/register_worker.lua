-- Register a worker.
-- KEYS  its hash, index of workers, stored settings, schedules, pauses, jobs
-- ARGV  worker, milliseconds of silence after which it is removed, its start time or 0 for now, milliseconds since its
--       last progress or -1, then field and value of all else
-- returns  {its start time, milliseconds of Redis' clock, fields and values of the stored settings, whether there are
--          schedules: 1 or 0, fields and values of the pauses, whether there are jobs, ended ones too, whether an
--          operator drains the worker: 1 or 0}
-- Atomic: no hash is without a TTL, and none has fields of two registrations, except the request of drain_worker.lua,
-- which stays. Idempotent. A registration that arrives
-- after the worker has left, which its hash says, changes nothing. The first write needs no memory, so that a full
-- server accepts the rest (see fence.lua). A member in the future is not a worker, or the clock was set back: that
-- worker lists itself again at its next registration.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local started = tonumber(ARGV[3])
if started == 0 then
  started = now
end
if redis.call('HEXISTS', KEYS[1], 'left') == 1 then
  return {started, now, redis.call('HGETALL', KEYS[3]), redis.call('EXISTS', KEYS[4]), redis.call('HGETALL', KEYS[5]),
    redis.call('EXISTS', KEYS[6]), 0}
end
local old = redis.call('HKEYS', KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'seen', now, 'started', started, unpack(ARGV, 5))
if tonumber(ARGV[4]) >= 0 then
  redis.call('HSET', KEYS[1], 'progress', now - tonumber(ARGV[4]))
end
local written = {id = true, seen = true, started = true, drain = true, drain_by = true, progress = tonumber(ARGV[4]) >= 0}
for i = 5, #ARGV, 2 do
  written[ARGV[i]] = true
end
for i = 1, #old do
  if not written[old[i]] then
    redis.call('HDEL', KEYS[1], old[i])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[2], '(' .. now, '+inf')
return {started, now, redis.call('HGETALL', KEYS[3]), redis.call('EXISTS', KEYS[4]), redis.call('HGETALL', KEYS[5]),
  redis.call('EXISTS', KEYS[6]), redis.call('HEXISTS', KEYS[1], 'drain')}
