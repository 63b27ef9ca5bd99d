-- include: fence, inbox, retention, on_end, streams, tag, turns
-- Settle a delivery for good: the task has succeeded, or was cancelled.
-- KEYS  ready stream, record, inbox, control, retentions, timeline, then steps and log if there may be any, then the
--       record of its clean-up task if it has one, then the outbox if ARGV has the retentions at its end
-- ARGV  fence (4), last entry (see gap), state, result (JSON), attempts, crashes, milliseconds of the last run,
--       retention of all keys of the task in milliseconds, the same rounded up to one that is registered, then id,
--       envelope and arguments of the clean-up task if it has one, then names and values of what the record gets: the
--       time of the enqueue, unless it has that, the successor, and the clean-up task; last the name `kept` and both
--       retentions, if the caller knows that the task has watchers
-- returns  0 refused, the lease has passed; 1 settled; 2 nothing was done: the task has watchers, and the caller asks again
--          with the outbox; 3 settled, and its notice is in the outbox; 4 nothing was done: the task leaves messages unread,
--          and the caller asks again with its steps and log; -1 - N refused, see gap; {1 or 3, number of messages that are
--          left unread} in place of 1 or 3
-- Atomic: stores the outcome, acknowledges and deletes the message, sets the retention, enqueues the clean-up task, and
-- puts the notice for watchers into the outbox.
-- Field `unused_answers` is the number of answers that came early and no wait has used. If the task succeeds, field
-- `unread` and the event `left_unread` have the number of messages that no run has read, unless a successor gets them:
-- after this, none is accepted.
-- as in watched.lua, without its functions: each call of a script would create them for plain tasks as well
local about = redis.call('HMGET', KEYS[2], 'watchers', 'streams', 'gate', 'args', 'entries')
local kept = redis.call('EXISTS', KEYS[3], KEYS[4]) > 0
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
local own = pending and pending[2] == ARGV[2] and tostring(pending[4]) == ARGV[4]
-- The plain end of nearly all tasks, as below, without what it does not need: a caller without more keys has no watchers and
-- no clean-up task, and the record has its payload.
if own and (#KEYS == 6 or #KEYS == 8) and not (kept or about[1] or about[2] or about[3]) and about[4]
  and tonumber(about[5] or 0) >= tonumber(ARGV[5]) then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local used_until = tonumber(redis.call('ZSCORE', KEYS[5], ARGV[12]) or 0)
  if used_until >= now and used_until < 1e15 then
    redis.call('HDEL', KEYS[2], 'entry', 'run', 'began', 'alive', 'step', 'step_at', 'suspect', 'returned')
    redis.call('HSET', KEYS[2], 'state', ARGV[6], 'result', ARGV[7], 'attempts', ARGV[8], 'crashes', ARGV[9],
      'ran', ARGV[10], 'finished', now, 'worker', ARGV[2], 'settled', ARGV[3] .. ' ' .. ARGV[4], unpack(ARGV, 13))
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
    redis.call('XDEL', KEYS[1], ARGV[3])
    redis.call('PEXPIRE', KEYS[2], ARGV[11])
    redis.call('PEXPIRE', KEYS[6], 2592000000)
    for i = 7, #KEYS do
      redis.call('PEXPIRE', KEYS[i], ARGV[11])
    end
    redis.call('PUBLISH', KEYS[2], ARGV[6])
    return 1
  end
end

-- preludes
local function unread(inbox)
  local used, sent = inbox_counts(inbox, 1000)
  local found = 0
  for position = used + 1, sent do
    found = found + (unread_number(inbox, position) and 1 or 0)
  end
  return found
end

local watched = about[1] and true or false
local answer = watched and 3 or 1
if not own then
  if not settled(KEYS[2]) then
    return 0
  end
  local stored = inbox_number(redis.call('HGET', KEYS[2], 'unread'))
  return stored > 0 and {answer, stored} or answer
end
local known = ARGV[#ARGV - 1] == 'kept'
if watched and not known then
  return 2
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
local left = kept and ARGV[6] == 'succeeded' and redis.call('HEXISTS', KEYS[2], 'handed_to') == 0 and unread(KEYS[3])
left = left and left > 0 and left
if left and #KEYS - (known and 1 or 0) < 8 then
  return 4
end
local early = kept and inbox_number(string.match(redis.call('HGET', KEYS[3], 'early') or '', '^(%d+) %d+$')) or 0
local streams = about[2] and stream_keys(KEYS[2])
local tag, key_id, ring
if about[3] then
  tag, key_id, ring = line_of(KEYS[2], about[3], false)
end
for i = 8, left and 8 or 0 do
  -- a log of another type ends the script here, before its first write
  redis.call('XLEN', KEYS[i])
end
begin_outcome(KEYS[1], KEYS[2])
local now = now_ms()
register_retention(KEYS[5], ARGV[12], now)
redis.call('HSET', KEYS[2], 'state', ARGV[6], 'result', ARGV[7], 'attempts', ARGV[8], 'crashes', ARGV[9],
  'ran', ARGV[10], 'finished', now, 'worker', ARGV[2], 'settled', fence_text(), unpack(ARGV, #KEYS > (known and 9 or 8) and 16 or 13))
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
if not watched then
  redis.call('PEXPIRE', KEYS[2], ARGV[11])
end
redis.call('PEXPIRE', KEYS[6], 2592000000)
if kept then
  if left then
    redis.call('HSET', KEYS[2], 'unread', left)
  end
  if early > 0 then
    redis.call('HSET', KEYS[2], 'unused_answers', early)
  end
  redis.call('DEL', KEYS[4])
  redis.call('PEXPIRE', KEYS[3], ARGV[11])
end
for i = 7, #KEYS do
  if known and i == #KEYS then
    if watched then
      redis.call('ZADD', KEYS[i], now + 3000, string.match(KEYS[2], '[^:]*$'))
    end
  elseif i > 8 then
    enqueue_cleanup(KEYS[1], KEYS[6], KEYS[i], ARGV[13], ARGV[14], ARGV[15])
  else
    if left and i == 8 then
      -- a log without an id left must not end the script between its writes
      redis.pcall('XADD', KEYS[i], '*', 'type', 'left_unread', 'data', '{"count":' .. left .. '}')
    end
    redis.call('PEXPIRE', KEYS[i], ARGV[11])
  end
end
if tag then
  leave_line(tag, string.match(KEYS[2], '[^:]*$'), key_id, ring, now)
end
if streams then
  expire_streams(streams, ARGV[11])
end
redis.call('PUBLISH', KEYS[2], ARGV[6])
return left and {answer, left} or answer
