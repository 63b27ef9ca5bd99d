-- include: wake
-- Edit the checkpoint of a task that no worker has, log it as an event, and wake the task if it waits for the edit.
-- KEYS  record, steps, log, due set, nudge stream, ready stream
-- ARGV  group, first character of the consumers that are not workers, task id, what the caller has read of the record:
--       number of its last event, of its last entry, settled, replays, entry; type and data of the event, what a task
--       waits for that the edit wakes, head of the hash chain after the event ('' without a key), number of fields to delete,
--       their names, then names and values of fields to set
-- returns  2 edited, and the task is due now; 1 edited; 0 refused: a worker has the task, it has ended, or it is not what
--          the caller has read: a run or another edit has written since
-- Atomic: no worker reads half an edit. A run takes its numbers and its checkpoint after it has the message: a task in
-- the due set, a dead letter, and a message that no worker has, have no run, and the numbers tell whether there was one
-- since. Before the first worker comes, there is no group: XPENDING answers with an error, and no worker has the
-- message. Not idempotent: after a lost reply the second call is refused, because the numbers are others. The steps exist
-- here, so they have the TTL of the record.
local task = redis.call('HMGET', KEYS[1], 'state', 'events', 'entries', 'settled', 'replays', 'entry', 'waits')
local function taken()
  if task[1] == 'queued' and task[6] then
    local pending = redis.pcall('XPENDING', KEYS[6], ARGV[1], task[6], task[6], 1)
    return pending[1] and string.sub(pending[1][2], 1, 1) ~= ARGV[2]
  end
  return task[1] ~= 'scheduled' and task[1] ~= 'dead'
end

if (task[2] or '0') ~= ARGV[4] or (task[3] or '0') ~= ARGV[5] or (task[4] or '') ~= ARGV[6]
  or (task[5] or '') ~= ARGV[7] or (task[6] or '') ~= ARGV[8] or taken() or redis.call('EXISTS', KEYS[2]) == 0 then
  return 0
end
-- a key of another type ends the script here, before its first write
redis.call('HEXISTS', KEYS[2], '')
redis.call('XRANGE', KEYS[3], '0-0', '0-0')
redis.call('ZSCORE', KEYS[4], '')
local first = 14 + ARGV[13]
redis.call('HSET', KEYS[1], 'events', ARGV[4] + 1, 'entries', ARGV[5] + 1)
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[1], 'head', ARGV[12])
end
for i = first, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
for i = 14, first - 1 do
  redis.call('HDEL', KEYS[2], ARGV[i])
end
redis.call('XADD', KEYS[3], '*', 'type', ARGV[9], 'n', ARGV[4] + 1, 'data', ARGV[10], 'e', ARGV[5] + 1)
redis.call('PUBLISH', KEYS[1], ARGV[9])
if task[1] ~= 'scheduled' or task[7] ~= ARGV[11] then
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
wake(KEYS[4], KEYS[5], ARGV[3], now)
return 2
