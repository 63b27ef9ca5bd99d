-- Return the tasks that are due now, by the clock of Redis. Read-only.
-- KEYS  due set, rings, tasks that keep tokens; the last two if the caller wants to know when those are to be looked at
-- ARGV  largest number of ids
-- returns  {ids of due tasks, milliseconds until the next due time, or -1 if nothing is scheduled, milliseconds until the
--          next look at a ring, 0 if one is due, -1 if none has waiting tasks, and likewise until a token is renewed}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local next_due = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
local wait = -1
if next_due[2] then
  wait = math.ceil(tonumber(next_due[2]) - now)
end
local function first_of(key)
  local first = key and redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  return first and math.max(0, math.ceil(math.min(tonumber(first) - now, 1e9))) or -1
end
return {ids, wait, first_of(KEYS[2]), first_of(KEYS[3])}
