-- include: upload
-- Store one task with large arguments: on the ready stream, or in the due set. An id that has a record is left alone.
-- KEYS  ready stream, mark of a closed partition, timeline, record, upload, due set, nudge stream
-- ARGV  id, envelope, arguments, delay in milliseconds, 0 for none
-- returns  1 stored now; 0 the id is known already; -1 the partition is closed; nil the upload is not complete
-- Atomic: the upload becomes the record in the script that adds the message or the due time, and the entry in the
-- timeline. The rest is as in enqueue.lua and schedule.lua.
if redis.call('EXISTS', KEYS[4]) == 1 then
  return 0
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
if not complete(KEYS[5], ARGV[3]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[6], '')
take_upload(KEYS[5], KEYS[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[4] == '0' then
  local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[2], 'args', ARGV[3])
  redis.call('HSET', KEYS[4], 'state', 'queued', 'entry', entry, 'env', ARGV[2], 'args', ARGV[3])
  now = string.match(entry, '^%d+')
else
  local due = now + tonumber(ARGV[4])
  local first = redis.call('ZRANGE', KEYS[6], 0, 0, 'WITHSCORES')
  redis.call('ZADD', KEYS[6], due, ARGV[1])
  redis.call('HSET', KEYS[4], 'state', 'scheduled', 'at', now, 'due', due, 'env', ARGV[2], 'args', ARGV[3])
  if not first[2] or due < tonumber(first[2]) then
    redis.call('XADD', KEYS[7], 'MAXLEN', 16, '*', 'why', 'due')
  end
end
redis.call('ZADD', KEYS[3], now, ARGV[1])
return 1
