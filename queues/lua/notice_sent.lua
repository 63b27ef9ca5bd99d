-- include: retention
-- Take a task out of the outbox, since its watchers know of its end, and let its record expire.
-- KEYS  record, outbox, retentions
-- ARGV  task id, then what the caller has read of the record: finished, settled, replays; shortest retention in
--       milliseconds, the same rounded up to one that is registered
-- returns  1 done; 0 the task has ended again since it was read: there is another notice
-- Atomic: a record has no TTL as long as its notice is in the outbox; its retention counts from its end. Idempotent. A
-- launch of the child that arrives late finds its record for the shortest retention at least. A dead letter keeps its
-- watchers: they learn of the end of its replay. The first write frees memory (see fence.lua).
local now = redis.call('HMGET', KEYS[1], 'finished', 'settled', 'replays', 'kept', 'state')
if (now[1] or '') ~= ARGV[2] or (now[2] or '') ~= ARGV[3] or (now[3] or '') ~= ARGV[4] then
  return 0
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZREM', KEYS[2], ARGV[1])
local kept, registered = string.match(now[4] or '', '^(%d+) (%d+)$')
if kept and now[1] then
  local time = redis.call('TIME')
  local time_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  if tonumber(kept) < tonumber(ARGV[5]) then
    registered = ARGV[6]
  end
  kept = math.max(kept - math.max(0, time_ms - (tonumber(now[1]) or time_ms)), tonumber(ARGV[5]))
  redis.call('HDEL', KEYS[1], 'kept', now[5] ~= 'dead' and 'watchers' or 'kept')
  register_retention(KEYS[3], registered, time_ms)
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', kept))
end
return 1
