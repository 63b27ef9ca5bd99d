-- Return how far a partition has been drained after it was closed. Read-only.
-- KEYS  ready stream, due set, mark of a closed partition, rings
-- ARGV  group
-- returns  -1 open; 0 closed, and not read to its end; 1 read to its end; 2 and no task waits, runs or is due in it
-- The end is the last id of the mark. Later messages (retries, delayed tasks, replays) do not count: 1 never turns
-- into 0 again. After 2, only a replay adds a message. Messages may be deleted before they are read (cancelled), so
-- comparing ids is not enough.
local last = redis.call('HGET', KEYS[3], 'last')
if not last then
  return -1
end
if not string.match(last, '^%d+%-%d+$') then
  last = '+' -- another program wrote the mark: every message must have been delivered
end
if redis.call('XLEN', KEYS[1]) + redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[4]) == 0 then
  return 2
end
local delivered = '0-0'
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
for i = 1, #groups do
  local group = {}
  for at = 1, #groups[i], 2 do
    group[groups[i][at]] = groups[i][at + 1]
  end
  if group['name'] == ARGV[1] then
    delivered = group['last-delivered-id']
  end
end
return #redis.call('XRANGE', KEYS[1], '(' .. delivered, last, 'COUNT', 1) == 0 and 1 or 0
