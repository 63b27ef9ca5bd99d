-- include: upload, tag, turns, limited
-- Enqueue a child of a join, with the watchers that get a notice of its end. An id that has a record is left alone.
-- KEYS  ready stream, mark of a closed partition, record, timeline, upload of large arguments
-- ARGV  envelope, arguments, id, watchers
-- returns  1 stored now, 0 the id is known already, -1 the partition is closed; nil the upload of large arguments, if the
--          caller names one, is not complete (see upload.lua)
-- Atomic: message, record, watchers and entry in the timeline appear together. Idempotent: a launch that is repeated finds
-- the record, which stays until the join has its result. The message has the field `watched`, so that the worker that
-- ends the task names the outbox at once; one that was put back has not, and then the worker is asked for it. A child that
-- has limits waits in their list, as in enqueue_limited.lua.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return 0
end
local tag = tag_of(KEYS[1])
local key_id, ring = gate_of(KEYS[3], ARGV[1])
key_id = key_id and sound_line(tag, key_id, ring) and key_id
if redis.call('EXISTS', KEYS[2]) == 1 and not keeps_closed(tag, key_id or '') then
  return -1
end
if KEYS[5] and not complete(KEYS[5], ARGV[2]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('ZSCORE', KEYS[4], '')
if KEYS[5] then
  take_upload(KEYS[5], KEYS[3])
end
if key_id then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local ms = math.floor(now / 1000)
  redis.call('HSET', KEYS[3], 'state', 'limited', 'at', ms, 'env', ARGV[1], 'args', ARGV[2], 'watchers', ARGV[4])
  wait_in_line(tag, KEYS[3], ARGV[3], key_id, ring, 0, now, ms)
  redis.call('ZADD', KEYS[4], ms, ARGV[3])
  redis.call('PEXPIRE', KEYS[4], 2592000000)
  return 1
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2], 'watched', '1')
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'env', ARGV[1], 'args', ARGV[2], 'watchers', ARGV[4])
redis.call('ZADD', KEYS[4], string.match(entry, '^%d+'), ARGV[3])
redis.call('PEXPIRE', KEYS[4], 2592000000)
return 1
