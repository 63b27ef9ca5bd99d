-- include: fence, inbox
-- Settle a delivery by putting the task into the due set until what it waits for has come, or its time.
-- KEYS  ready stream, record, due set, nudge stream, inbox, control
-- ARGV  fence (4), last entry (see gap), task id, attempts, crashes, returns, milliseconds after which it runs in any
--       case, what it waits for, what wakes it (message: any message to its inbox; time: nothing before its time),
--       number of the last message that the run knows of
-- returns  0 refused, the lease has passed; 1 settled; -1 - N refused, see gap
-- Atomic: the task is due or pending, never both, never neither. Its payload is in the record.
-- If a message wakes the task, and one came after the run has looked, the task is due at once: no message can come
-- between the run's look and this act unseen. So is a task whose cancellation was requested. Field `wakes` tells the
-- scripts that may wake a task whether they do. A record without it was parked by an earlier version: a message wakes
-- it. The run has logged already that it waits.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and 1 or 0
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
local came = ARGV[12] == 'message' and inbox_number(redis.call('HGET', KEYS[5], 'last')) > tonumber(ARGV[13])
local due = now_ms()
if not came and redis.call('HEXISTS', KEYS[6], 'cancel') == 0 then
  due = due + tonumber(ARGV[10])
end
begin_outcome(KEYS[1], KEYS[2])
put_off(KEYS[3], KEYS[4], KEYS[2], ARGV[6], due)
close(KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'scheduled', 'worker', ARGV[2],
  'attempts', ARGV[7], 'crashes', ARGV[8], 'returns', ARGV[9], 'waits', ARGV[11], 'wakes', ARGV[12])
redis.call('PUBLISH', KEYS[2], 'waiting')
return 1
