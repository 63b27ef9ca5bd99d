-- include: inbox, waits, wake
-- Store the answer to a wait of a task, or keep it for the first wait of a name, and wake the task if this wakes it.
-- KEYS  record, inbox, due set, nudge stream
-- ARGV  task id, name of the wait, its id ('' if the sender has found none of this name), the first three words of the
--       wait as the sender has read it, the word by which a parked task waits for it, digest of the answer's id, the
--       answer, largest number of answers that came early, largest size of them in bytes
-- returns  {'answered', state of the task (waiting: it is parked)}; {'used', state}: it has closed a wait of this name;
--          {'kept', state}: for the first wait of this name;
--          {'missing'}; {'moved', id of the successor}; {'ended', state}; {'encrypted'}: see send_message.lua;
--          {'changed'}: the waits are not as the sender has read them; {'late'}: the time of the wait has passed;
--          {'taken', 'answer' or 'early'}: it has another answer; {'closed', waits of this name that were closed};
--          {'full', answers that came early, their bytes}
-- Atomic: the answer is stored, and the task is due, both or none. Idempotent: after a lost reply it answers with the
-- same, also if the run has used the answer since, until 20 others have closed a wait of this name. An answer is for
-- the wait that its sender has read: one that was opened again since does not take it. After its time a wait takes no
-- answer, so a run that has seen no answer then may close it. What wakes a parked task: see park.lua.
local task = redis.call('HMGET', KEYS[1], 'state', 'handed_to', 'waits', 'wakes')
local state = task[1]
local shown = state == 'scheduled' and task[3] and 'waiting' or state
if not state then
  return {'missing'}
end
local opened, closed, digests = wait_counts(KEYS[2], ARGV[2])
local early, id = ARGV[3] == '', ARGV[3]
local field = early and 'e:' .. ARGV[2] or 'a:' .. id
local held = redis.call('HGET', KEYS[2], field)
if held and string.match(held, '^%d+ (%x+) ') == ARGV[6] then
  return {early and 'kept' or 'answered', shown}
elseif string.find(',' .. digests .. ',', ',' .. ARGV[6] .. ',', 1, true) then
  return {'used', shown}
elseif task[2] then
  return {'moved', task[2]}
elseif state == 'succeeded' or state == 'cancelled' then
  return {'ended', state}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if early then
  if opened > closed then
    return {'changed'}
  elseif opened > 0 then
    return {'closed', tostring(closed)}
  end
else
  local head = string.match(redis.call('HGET', KEYS[2], 'w:' .. id) or '', '^%d+ %d+ %d+')
  if head ~= ARGV[4] then
    return {'changed'}
  end
  local limit = inbox_number(string.match(head, ' (%d+) '))
  if limit > 0 and now >= limit then
    return {'late'}
  end
end
if held then
  return {'taken', early and 'early' or 'answer'}
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
if string.byte(ARGV[7]) ~= 193 and string.byte(redis.call('HGET', KEYS[1], 'args') or '') == 193 then
  return {'encrypted'}
end
local stored = now .. ' ' .. ARGV[6] .. ' ' .. ARGV[7]
if early then
  local count, bytes = early_counts(KEYS[2])
  if count >= tonumber(ARGV[8]) or bytes + #stored > tonumber(ARGV[9]) then
    return {'full', tostring(count), tostring(bytes)}
  end
  redis.call('HSET', KEYS[2], field, stored, 'early', (count + 1) .. ' ' .. (bytes + #stored))
else
  redis.call('HSET', KEYS[2], field, stored)
end
if not early and state == 'scheduled' and task[3] and is_woken_by(task[4], ARGV[5]) then
  wake(KEYS[3], KEYS[4], ARGV[1], now)
end
redis.call('PUBLISH', KEYS[1], 'answer')
return {early and 'kept' or 'answered', shown}
