-- include: fence, joins
-- Add children to a join, and open as many of them as its window has room for. The first call creates the join.
-- KEYS  ready stream, record of the parent, join, its open children, its children that are not launched, joins
-- ARGV  fence (4) of the parent, id of the parent, group, number of the first child of this call (from 0), mode, limit (0
--       for none), life of the parent, then id and message of each child: an empty message belongs to a child that the
--       parent launches itself, whatever the limit is; one that begins with '@' is the place of a task that exists
-- returns  0 refused, the lease has passed; {0} refused, the join was closed; -1 - N: the join has only N children, and
--          lacks those before the first; else {1, ids of the children of this call to launch now: their launch is not
--          confirmed}
-- Atomic: a child is in the join before its notice can arrive. Idempotent: children are counted, and those that the join
-- has are not added again. A join that was closed is not created again by bytes that arrive late (see close_join.lua). The first write needs memory, so that a full server refuses the whole script.
if not owned(KEYS[1]) then
  return 0
end
local known = redis.call('HMGET', KEYS[3], 'total', 'closed', 'limit')
local total, number = tonumber(known[1] or 0), tonumber(ARGV[7])
local waiting = redis.call('LLEN', KEYS[5])
if known[2] or (not known[1] and waiting > 0) then
  return {0}
elseif number > total then
  return -1 - total
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[6], '')
local here = redis.call('HEXISTS', KEYS[2], 'state') == 1
local room = waiting > 0 and 0 or join_room(tonumber(known[3] or ARGV[9]), redis.call('SCARD', KEYS[4]))
local launched = {1}
if not known[1] then
  redis.call('HSET', KEYS[3], 'total', 0, 'mode', ARGV[8], 'limit', ARGV[9], 'life', ARGV[10])
  if here then
    redis.call('HSET', KEYS[2], 'joins', '1')
  end
  redis.call('ZADD', KEYS[6], now_ms() + 5000, ARGV[5] .. ':' .. ARGV[6])
end
for i = 11, #ARGV, 2 do
  local child, message = ARGV[i], ARGV[i + 1]
  if number < total then
    if redis.call('HEXISTS', KEYS[3], 'l:' .. child) == 1 then
      launched[#launched + 1] = child
    end
  elseif string.sub(message, 1, 1) == '@' then
    redis.call('SADD', KEYS[4], child)
    redis.call('HSET', KEYS[3], 'p:' .. child, string.sub(message, 2))
  elseif message == '' or room > 0 then
    redis.call('SADD', KEYS[4], child)
    redis.call('HSET', KEYS[3], 'l:' .. child, message)
    launched[#launched + 1] = child
    room = room - 1
  else
    redis.call('RPUSH', KEYS[5], child .. ' ' .. message)
    room = 0
  end
  number = number + 1
end
if number > total then
  redis.call('HSET', KEYS[3], 'total', number)
end
return launched
