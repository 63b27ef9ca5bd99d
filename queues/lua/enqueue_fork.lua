-- include: upload
-- Store the fork of a task: its checkpoint, the first event of its log, its record and its message.
-- KEYS  ready stream, mark of a closed partition, record, steps, log, timeline, upload
-- ARGV  envelope, arguments, what it is a fork of, data of its first event, id, then fields and values of its checkpoint
-- returns  1 stored, now or by the same call before; 0 the id belongs to another task; -1 the partition is closed; nil the
--          upload of large arguments, if the caller names one, is not complete (see upload.lua)
-- Atomic: no worker sees the message without the checkpoint. Idempotent: the record says what the task is a fork of. A
-- fork that is known stays known after the partition was closed: the reply that said so was lost.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return redis.call('HGET', KEYS[3], 'forked') == ARGV[3] and 1 or 0
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
if KEYS[7] and not complete(KEYS[7], ARGV[2]) then
  return false
end
if KEYS[7] then
  take_upload(KEYS[7], KEYS[3])
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2], 'again', '1')
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'events', 1, 'forked', ARGV[3])
redis.call('XADD', KEYS[5], '*', 'type', 'forked', 'n', 1, 'data', ARGV[4])
redis.call('ZADD', KEYS[6], string.match(entry, '^%d+'), ARGV[5])
redis.call('PEXPIRE', KEYS[6], 2592000000)
for i = 6, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1])
end
return 1
