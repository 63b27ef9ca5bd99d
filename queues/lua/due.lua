-- What is due now, by Redis' own clock. Reads only.
-- KEYS  due set
-- ARGV  most ids wanted
-- returns  {ids that are due, milliseconds until the next due time, or -1 where nothing is scheduled}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local next_due = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
local wait = -1
if next_due[2] then
  wait = math.ceil(tonumber(next_due[2]) - now)
end
return {ids, wait}
