-- Return the tasks that are due now, by the clock of Redis. Read-only.
-- KEYS  due set
-- ARGV  largest number of ids
-- returns  {ids of due tasks, milliseconds until the next due time, or -1 if nothing is scheduled}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local next_due = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
local wait = -1
if next_due[2] then
  wait = math.ceil(tonumber(next_due[2]) - now)
end
return {ids, wait}
