-- Whether everything that producers ever put into a partition has been delivered once. Reads only.
-- KEYS  ready stream, due set, mark of a closed partition
-- ARGV  group
-- returns  -1 the partition is open, 0 it is closed and not read to its end, 1 it is read to its end,
--          2 and nothing waits, runs or is due in it
-- What comes later (retries, delayed tasks, replays) has ids beyond the mark's and is not asked about: once 1, never 0
-- again. After 2, only a replay brings something.
-- Messages may be deleted before they are read (cancelled), so it is not enough to compare ids.
local last = redis.call('HGET', KEYS[3], 'last')
if not last then
  return -1
end
if redis.call('XLEN', KEYS[1]) + redis.call('ZCARD', KEYS[2]) == 0 then
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
