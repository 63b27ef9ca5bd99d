-- include: upload
-- Enqueue the successor of a task once, with the handoff document in its checkpoint.
-- KEYS  ready stream, mark of a closed partition, record, steps, timeline, upload
-- ARGV  envelope, arguments, source (id of the continued task, and a token), field of the handoff in the checkpoint,
--       value, id
-- returns  1 stored now; 0 stored before by the same source; -1 the partition is closed; -2 the id is another task's;
--          nil the upload of large arguments, if the caller names one, is not complete (see upload.lua)
-- Atomic: message, record and handoff appear together. Idempotent: after a lost reply, or a second run of the
-- continued task, the source in the record shows that the successor is stored.
local known = redis.call('HMGET', KEYS[3], 'state', 'handed_from')
if known[1] then
  return known[2] == ARGV[3] and 0 or -2
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
if KEYS[6] and not complete(KEYS[6], ARGV[2]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('HEXISTS', KEYS[4], '')
redis.call('ZSCORE', KEYS[5], '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if KEYS[6] then
  take_upload(KEYS[6], KEYS[3])
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2], 'again', '1')
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'at', now, 'env', ARGV[1], 'args', ARGV[2],
  'handed_from', ARGV[3])
redis.call('HSET', KEYS[4], ARGV[4], ARGV[5])
redis.call('ZADD', KEYS[5], now, ARGV[6])
redis.call('PEXPIRE', KEYS[5], 2592000000)
return 1
