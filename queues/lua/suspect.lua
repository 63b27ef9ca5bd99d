-- Takes the next suspect, to run it alone.
-- KEYS  ready stream
-- ARGV  group, worker, consumer that holds suspects, then the entries that this worker holds already
-- returns  nothing where there is none; else {entry, delivery count, fields, 1 where more are waiting}
-- Atomic: looks and takes in one, so no two workers take the same. Asked twice (a lost reply), it returns what it gave
-- the first time: that is this worker's in Redis, and not yet among those that it holds.
local held = {}
for i = 4, #ARGV do
  held[ARGV[i]] = true
end
local found
local mine = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', #ARGV - 2, ARGV[2])
for i = 1, mine.err and 0 or #mine do
  if not held[mine[i][1]] then
    found = {mine[i][1], mine[i][4]}
    break
  end
end
local waiting = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 2, ARGV[3])
if waiting.err then
  return {}
end
local more = #waiting
if not found and waiting[1] then
  found = {waiting[1][1], waiting[1][4] + 1}
  more = more - 1
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, found[1], 'RETRYCOUNT', found[2], 'JUSTID')
end
if not found then
  return {}
end
local message = redis.call('XRANGE', KEYS[1], found[1], found[1])[1]
if not message then
  redis.call('XACK', KEYS[1], ARGV[1], found[1])
  return {false, 0, {}, more > 0 and 1 or 0}
end
return {found[1], found[2], message[2], more > 0 and 1 or 0}
