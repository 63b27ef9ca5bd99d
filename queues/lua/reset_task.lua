-- include: upload, streams
-- Store a task in the place of an ended one with the same id.
-- KEYS  ready stream, mark of a closed partition, record, steps, log, dead-letter stream, inbox, timeline, upload
-- ARGV  envelope, arguments, token of this call, id, then what the caller has read of the record: finished, token,
--       replays
-- returns  the state of a task that has not ended; 'stored'; 'closed' if the partition is closed: what an ended task
--          left here was deleted, and the caller stores the task in another partition; 'changed': the record is not that
--          of the task that the caller has read; or nil: the upload of large arguments, if
--          the caller names one, is not complete (see upload.lua)
-- Atomic: what the earlier task left, a dead letter included, is deleted in the script that adds the new message.
-- Idempotent: after a lost reply, the token in the record shows that the task is stored. A command that arrives late
-- does not replace a task that was stored since.
local held = redis.call('HMGET', KEYS[3], 'state', 'dead', 'token', 'finished', 'replays')
if held[3] == ARGV[3] then
  return 'stored'
end
if held[1] and held[1] ~= 'succeeded' and held[1] ~= 'dead' and held[1] ~= 'cancelled' then
  return held[1]
end
if (held[4] or '') ~= ARGV[5] or (held[3] or '') ~= ARGV[6] or (held[5] or '') ~= ARGV[7] then
  return 'changed'
end
if KEYS[9] and not complete(KEYS[9], ARGV[2]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('XRANGE', KEYS[6], '0-0', '0-0')
redis.call('ZSCORE', KEYS[8], '')
local streams = stream_keys(KEYS[3])
local closed = redis.call('EXISTS', KEYS[2]) == 1
if KEYS[9] and not closed then
  take_upload(KEYS[9], KEYS[3])
else
  redis.call('DEL', KEYS[3])
end
if held[2] then
  redis.call('XDEL', KEYS[6], held[2])
end
redis.call('DEL', KEYS[4], KEYS[5], KEYS[7], unpack(streams))
if closed then
  redis.call('ZREM', KEYS[8], ARGV[4])
  return 'closed'
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2])
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'env', ARGV[1], 'args', ARGV[2],
  'token', ARGV[3])
redis.call('ZADD', KEYS[8], string.match(entry, '^%d+'), ARGV[4])
redis.call('PEXPIRE', KEYS[8], 2592000000)
return 'stored'
