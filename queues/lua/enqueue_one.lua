-- include: upload, tag, turns, limited, depth
-- Store one task, with large arguments or under the claim of a unique key: on the ready stream, in the due set, or in
-- the waiting list of its limits. An id that has a record is left alone.
-- KEYS  ready stream, closed mark, timeline, record, due set, nudge stream, upload, then waiting list, turns and rings
-- ARGV  id, envelope, arguments, delay in milliseconds, 0 for none; end of the claim in ms of Redis' clock, '' without
--       one; request to cancel the task of this partition that this one replaces, '' for none (see handle.py); KEYID and
--       RING of its limits and '1' if it replaces the tasks of the KEYID that wait, '' without; number of waiting tasks,
--       with a delay of scheduled ones too, from which on none is stored, if the caller has a limit
--       The caller names the record in place of the upload without large arguments, and the last keys if it has limits
-- returns  1 stored now; 0 the id is known already; -1 the partition is closed; -2 the claim has ended; -3 too many tasks
--          wait; nil the upload is not complete
-- Atomic: the upload becomes the record in the script that adds the message or the due time, the entry in the timeline, and
-- the request. A producer that was stopped for longer than its claim stores nothing: another one may have the key by then.
-- The rest is as in enqueue.lua, schedule.lua and enqueue_limited.lua.
if redis.call('EXISTS', KEYS[4]) == 1 then
  return 0
end
local tag, key_id, ring = tag_of(KEYS[1]), ARGV[7] or '', ARGV[8]
if redis.call('EXISTS', KEYS[2]) == 1 and not keeps_closed(tag, key_id) then
  return -1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[5] ~= '' and now >= tonumber(ARGV[5]) then
  return -2
end
local limit = tonumber(ARGV[10])
if limit and waiting(KEYS[1], limit) + (ARGV[4] == '0' and 0 or redis.call('ZCARD', KEYS[5])) >= limit then
  return -3
end
local upload = KEYS[7] and KEYS[7] ~= KEYS[4] and KEYS[7]
if upload and not complete(upload, ARGV[3]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[5], '')
for i = 8, #KEYS do
  redis.call('ZSCORE', KEYS[i], '')
end
if upload then
  take_upload(upload, KEYS[4])
end
if ARGV[4] == '0' and key_id ~= '' then
  if ARGV[9] == '1' then
    request_replacement(tag, key_id, ARGV[1])
  end
  redis.call('HSET', KEYS[4], 'state', 'limited', 'at', now, 'env', ARGV[2], 'args', ARGV[3])
  wait_in_line(tag, KEYS[4], ARGV[1], key_id, ring, 0, time[1] * 1000000 + time[2], now)
  redis.call('ZADD', KEYS[3], now, ARGV[1])
elseif ARGV[4] == '0' then
  local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[2], 'args', ARGV[3])
  redis.call('HSET', KEYS[4], 'state', 'queued', 'entry', entry, 'env', ARGV[2], 'args', ARGV[3])
  redis.call('ZADD', KEYS[3], string.match(entry, '^%d+'), ARGV[1])
else
  local due = now + tonumber(ARGV[4])
  local first = redis.call('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')
  redis.call('ZADD', KEYS[5], due, ARGV[1])
  redis.call('HSET', KEYS[4], 'state', 'scheduled', 'at', now, 'due', due, 'env', ARGV[2], 'args', ARGV[3])
  redis.call('ZADD', KEYS[3], now, ARGV[1])
  if not first[2] or due < tonumber(first[2]) then
    redis.call('XADD', KEYS[6], 'MAXLEN', 16, '*', 'why', 'due')
  end
end
if ARGV[6] ~= '' then
  redis.call('ZADD', KEYS[5], 0, ARGV[6])
  redis.call('XADD', KEYS[6], 'MAXLEN', 16, '*', 'why', 'due')
end
return 1
