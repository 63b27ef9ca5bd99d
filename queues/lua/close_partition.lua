-- Close a partition: from now on it refuses producers, which go to the next generation of the route.
-- KEYS  ready stream, nudge stream, mark of a closed partition
-- ARGV  the queue's route
-- returns  the route with which the partition was closed first
-- Atomic: the mark holds the last id of the stream, after which no new task can come. XINFO runs through pcall:
-- without a stream there is no id. The nudge makes a worker read the route.
local known = redis.call('HGET', KEYS[3], 'route')
if known then
  return known
end
local last = '0-0'
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then
    last = info[i + 1]
  end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[3], 'route', ARGV[1], 'last', last, 'at', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'route')
return ARGV[1]
