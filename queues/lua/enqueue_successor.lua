-- include: upload
-- Enqueue the successor of a task once, with the handoff document in its checkpoint, and with the values of the task.
-- KEYS  ready stream, mark of a closed partition, record, steps, timeline, inbox, upload
-- ARGV  envelope, arguments, source (id of the continued task, and a token), field of the handoff in the checkpoint,
--       value, id, then names and values of the fields of the inbox with the values of the continued task
-- returns  1 stored now; 0 stored before by the same source; -1 the partition is closed; -2 the id is another task's;
--          nil the upload of large arguments, if the caller names one, is not complete (see upload.lua)
-- Atomic: message, record, handoff and values appear together. Idempotent: after a lost reply, or a second run of the
-- continued task, the source in the record shows that the successor is stored.
local known = redis.call('HMGET', KEYS[3], 'state', 'handed_from')
if known[1] then
  return known[2] == ARGV[3] and 0 or -2
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
if KEYS[7] and not complete(KEYS[7], ARGV[2]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('HEXISTS', KEYS[4], '')
redis.call('HEXISTS', KEYS[6], '')
redis.call('ZSCORE', KEYS[5], '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if KEYS[7] then
  take_upload(KEYS[7], KEYS[3])
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2], 'again', '1')
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'at', now, 'env', ARGV[1], 'args', ARGV[2],
  'handed_from', ARGV[3])
redis.call('HSET', KEYS[4], ARGV[4], ARGV[5])
if ARGV[7] then
  redis.call('HSET', KEYS[6], unpack(ARGV, 7))
end
redis.call('ZADD', KEYS[5], now, ARGV[6])
redis.call('PEXPIRE', KEYS[5], 2592000000)
return 1
