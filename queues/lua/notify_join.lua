-- include: joins, wake
-- Deliver the notice of a child's end to the join of its parent, open the next child of the window, and wake the parent if
-- it need not wait any longer.
-- KEYS  record of the parent, join, its open children, its children that are not launched, joins, due set, nudge stream
-- ARGV  id of the parent, group, id of the child, how it has ended, its sealed result, its place as in confirm_launch.lua
--       ('' if it has none), which is stored if the launch was not confirmed
-- returns  {0}: the join is gone, or does not wait for the child (any more); else {1, or 2 if it has woken the parent, id and
--          message of each child to launch}
-- Atomic: a child leaves the open ones in the act that stores its result. Idempotent by that set: bytes that arrive late
-- change nothing. A dead child of a join with the mode `wait` stays open: its replay is to satisfy the join. One that was
-- cancelled or lost cannot be replayed. The first write frees memory (see fence.lua); sets and lists shrink last. What
-- wakes a parked task: see park.lua. A launch that its caller does not confirm is repeated by a janitor, which looks soon.
local known = redis.call('HMGET', KEYS[2], 'total', 'mode', 'limit', 'ended', 'failed', 'closed')
if not known[1] or redis.call('SISMEMBER', KEYS[3], ARGV[3]) == 0 then
  return {0}
end
local succeeded, mode = ARGV[4] == 'succeeded', known[2]
if ARGV[4] == 'dead' and mode == 'wait' then
  return {1}
end
local task = redis.call('HMGET', KEYS[1], 'state', 'waits', 'wakes')
local open, waiting = redis.call('SCARD', KEYS[3]) - 1, redis.call('LLEN', KEYS[4])
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[5], '')
redis.call('ZSCORE', KEYS[6], '')
redis.call('XRANGE', KEYS[7], '0-0', '0-0')
local failed = known[5] or (not succeeded and mode ~= 'keep' and ARGV[3])
local next = {}
if not failed and not known[6] and waiting > 0 then
  local room = math.min(join_room(tonumber(known[3]), open), waiting, 100)
  next = room > 0 and redis.call('LRANGE', KEYS[4], 0, room - 1) or next
end
local unconfirmed = redis.call('HDEL', KEYS[2], 'l:' .. ARGV[3]) == 1
local ended = tonumber(known[4] or 0) + 1
redis.call('HSET', KEYS[2], 'ended', ended, 'd:' .. ended, ARGV[3] .. ' ' .. ARGV[4], 'r:' .. ARGV[3], ARGV[5])
if unconfirmed and ARGV[6] ~= '' then
  redis.call('HSET', KEYS[2], 'p:' .. ARGV[3], ARGV[6])
end
if failed and not known[5] then
  redis.call('HSET', KEYS[2], 'failed', failed)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answer = {1}
for _, item in ipairs(next) do
  local child, message = string.match(item, '^(%S+) (.*)$')
  redis.call('SADD', KEYS[3], child)
  redis.call('HSET', KEYS[2], 'l:' .. child, message)
  answer[#answer + 1] = child
  answer[#answer + 1] = message
end
if next[1] then
  redis.call('ZADD', KEYS[5], 'XX', 'LT', now + 5000, ARGV[1] .. ':' .. ARGV[2])
end
redis.call('SREM', KEYS[3], ARGV[3])
if next[1] then
  redis.call('LTRIM', KEYS[4], #next, -1)
end
if task[1] == 'scheduled' and task[2] then
  local over = failed or known[6] or open + waiting == 0
  local plain, counted = 'join:' .. ARGV[2], 'join:' .. ARGV[2] .. ':'
  for word in string.gmatch(task[3] or '', '%S+') do
    local after = string.sub(word, 1, #counted) == counted and tonumber(string.sub(word, #counted + 1))
    if (over and word == plain) or (after and (over or ended > after)) then
      answer[1] = wake(KEYS[6], KEYS[7], ARGV[1], now) and 2 or answer[1]
    end
  end
end
redis.call('PUBLISH', KEYS[1], 'join')
return answer
