-- include: fence, inbox, joins, tag
-- Settle a delivery by putting the task into the due set until a condition that it waits for is over, or its time.
-- KEYS  ready stream, record, due set, nudge stream, inbox, control, then the keys of the joins among the conditions, in
--       their order: three of each (see joins.lua)
-- ARGV  fence (4), last entry (see gap), task id, attempts, crashes, returns, milliseconds after which it runs in any
--       case, what it waits for, what wakes it (words, separated by spaces: message, answer:ID, join:GROUP, join:GROUP:N,
--       limit:NAME, time), nonce and uses (JSON) of the token of limits that it keeps ('' for none), milliseconds until that is renewed, then
--       pairs: kind and value of a condition that may be over already (see is_over)
-- returns  0 refused, the lease has passed; 1 settled; -1 - N refused, see gap
-- Atomic: the task is due or pending, never both, never neither. Its payload is in the record.
-- If a condition is over, because its message or answer came after the run has looked, the task is due at once: nothing
-- can come between the run's look and this act unseen. So is a task whose cancellation was requested. Field `wakes` tells
-- the scripts that may wake a task whether they do (see wake.lua). The run has logged already that it waits. A token that is
-- kept is renewed by the worker that promotes the partition, as long as field `keeps` names it: see look_kept.lua.
local joined = {}
local function is_over(kind, value)
  if kind == 'message' then
    -- a message came after the one with this number
    return inbox_number(redis.call('HGET', KEYS[5], 'last')) > tonumber(value)
  elseif kind == 'answer' then
    -- the wait with this id is answered
    return redis.call('HEXISTS', KEYS[5], 'a:' .. value) == 1
  elseif kind == 'join' then
    -- all children of the join have ended, or more than this number of them: see below
    joined[#joined + 1] = tonumber(string.match(value, ':(%d+)$')) or ''
  end
  return false
end

local tag = tag_of(KEYS[2])
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
local over = redis.call('HEXISTS', KEYS[6], 'cancel') == 1
for i = 15, #ARGV, 2 do
  over = is_over(ARGV[i], ARGV[i + 1]) or over
end
for i = 7, #KEYS, 3 do
  over = join_over(KEYS[i], KEYS[i + 1], KEYS[i + 2], joined[(i - 4) / 3]) or over
end
local due = now_ms()
if not over then
  due = due + tonumber(ARGV[10])
end
if ARGV[13] ~= '' then
  -- a key of another type ends the script here, before its first write
  redis.call('ZSCORE', tag .. 'kept', '')
end
begin_outcome(KEYS[1], KEYS[2])
put_off(KEYS[3], KEYS[4], KEYS[2], ARGV[6], due)
close(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'worker', ARGV[2],
  'attempts', ARGV[7], 'crashes', ARGV[8], 'returns', ARGV[9], 'waits', ARGV[11], 'wakes', ARGV[12])
if ARGV[13] ~= '' then
  redis.call('HSET', KEYS[2], 'keeps', ARGV[13])
  redis.call('ZADD', tag .. 'kept', now_ms() + ARGV[14], ARGV[6])
end
redis.call('PUBLISH', KEYS[2], 'waiting')
return 1
