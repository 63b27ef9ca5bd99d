-- include: depth
-- Put tasks into the due set. An id that has a record already is left alone.
-- KEYS  due set, nudge stream, mark of a closed partition, timeline, ready stream, then one record per task
-- ARGV  delay in milliseconds, then id, envelope and arguments of each task; then the number of waiting and scheduled tasks
--       from which on none is stored, if the caller has a limit
-- returns  per task 1 stored now, 0 the id is known already, -1 the partition is closed, -3 too many tasks wait
-- Atomic: record, due time and entry in the timeline appear together, and nothing is stored once the partition is closed.
-- Nudges a worker if the earliest due time has changed.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[4], '')
local closed = redis.call('EXISTS', KEYS[3]) == 1
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = now + tonumber(ARGV[1])
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local stored, times = {}, {}
local limit = tonumber(ARGV[(#KEYS - 5) * 3 + 2])
local room = limit and limit - waiting(KEYS[5], limit) - redis.call('ZCARD', KEYS[1])
for i = 6, #KEYS do
  local at = (i - 6) * 3 + 2
  if redis.call('EXISTS', KEYS[i]) == 1 then
    stored[i - 5] = 0
  elseif closed then
    stored[i - 5] = -1
  elseif room and room <= 0 then
    stored[i - 5] = -3
  else
    redis.call('ZADD', KEYS[1], due, ARGV[at])
    redis.call('HSET', KEYS[i], 'state', 'scheduled', 'at', now, 'due', due,
      'env', ARGV[at + 1], 'args', ARGV[at + 2])
    times[#times + 1] = now
    times[#times + 1] = ARGV[at]
    stored[i - 5] = 1
    room = room and room - 1
  end
end
if times[1] then
  redis.call('ZADD', KEYS[4], unpack(times))
end
if times[1] and (not first[2] or due < tonumber(first[2])) then
  redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'due')
end
return stored
