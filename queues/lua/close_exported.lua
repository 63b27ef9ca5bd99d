-- include: retention, streams, tag, turns
-- Cancel a task that continues on another deployment, if nothing has changed it since it was read.
-- KEYS  record, steps, log, due set, retentions, inbox, control, timeline, dead-letter stream, ready stream
-- ARGV  task id, retention in milliseconds, the same rounded up to one that is registered, data of the event, group, first
--       character of the consumers that are not workers, then what the caller has read: state, events, entries, settled,
--       replays, dead, waits, at, entry, token of the record, sent, used, last, changed of the inbox, id of the last entry
--       of the log
-- returns  1 cancelled; 0 refused: a worker has the task, it has ended, something has changed, or tasks wait for its end
-- Atomic: no run, message, edit or replay comes between the comparison and the cancellation, and no worker reads a message
-- that is removed here. Before the first worker comes, there is no group: XPENDING answers with an error, and no worker has
-- the message. Not idempotent: after a lost reply the second call is refused. A call that arrives late does not cancel a
-- task that was replayed, or enqueued again under the same id, since. A token of limits that the task has kept while it was
-- parked is released by the worker that promotes the partition.
local now = redis.call('HMGET', KEYS[1], 'state', 'events', 'entries', 'settled', 'replays', 'dead', 'waits', 'at', 'entry',
  'token')
for _, value in ipairs(redis.call('HMGET', KEYS[6], 'sent', 'used', 'last', 'changed')) do
  now[#now + 1] = value
end
local newest = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
now[#now + 1] = newest and newest[1]
local state, entry = now[1], now[9]
local known = state == 'queued' or state == 'limited' or state == 'scheduled' or state == 'dead'
if not known or redis.call('HEXISTS', KEYS[1], state == 'dead' and 'kept' or 'watchers') == 1 then
  return 0
end
for i = 1, 15 do
  if (now[i] or '') ~= ARGV[6 + i] then
    return 0
  end
end
if state == 'queued' then
  local pending = entry and redis.pcall('XPENDING', KEYS[10], ARGV[5], entry, entry, 1)[1]
  if not entry or (pending and string.sub(pending[2], 1, 1) ~= ARGV[6]) then
    return 0
  end
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[4], '')
redis.call('ZSCORE', KEYS[5], '')
redis.call('XRANGE', KEYS[9], '0-0', '0-0')
redis.call('XRANGE', KEYS[10], '0-0', '0-0')
local streams = stream_keys(KEYS[1])
local tag, key_id, ring = line_of(KEYS[1], redis.call('HGET', KEYS[1], 'gate'), state == 'limited')
redis.call('XADD', KEYS[3], '*', 'type', 'exported', 'data', ARGV[4])
if state == 'queued' then
  redis.call('XACK', KEYS[10], ARGV[5], entry)
  redis.call('XDEL', KEYS[10], entry)
  redis.call('HSETNX', KEYS[1], 'at', string.match(entry, '^%d+'))
elseif state == 'scheduled' then
  redis.call('ZREM', KEYS[4], ARGV[1])
elseif state == 'dead' then
  local letter = redis.call('XRANGE', KEYS[9], now[6] or '-', now[6] or '-')[1]
  for i = 1, letter and #letter[2] or 0, 2 do
    if letter[2][i] == 'env' or letter[2][i] == 'args' then
      redis.call('HSET', KEYS[1], letter[2][i], letter[2][i + 1])
    end
  end
  if now[6] then
    redis.call('XDEL', KEYS[9], now[6])
  end
end
local time = redis.call('TIME')
local ended = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('HEXISTS', KEYS[1], 'keeps') == 1 then
  local tag = tag_of(KEYS[1])
  redis.pcall('ZADD', tag .. 'kept', 'XX', ended, ARGV[1])
end
redis.call('DEL', KEYS[7])
redis.call('HSET', KEYS[1], 'state', 'cancelled', 'finished', ended)
redis.call('HDEL', KEYS[1], 'entry', 'due', 'waits', 'wakes', 'dead', 'reason', 'error')
register_retention(KEYS[5], ARGV[3], ended)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('PEXPIRE', KEYS[6], ARGV[2])
expire_streams(streams, ARGV[2])
redis.call('PEXPIRE', KEYS[8], 2592000000)
if tag then
  leave_line(tag, ARGV[1], key_id, ring, ended)
end
redis.call('PUBLISH', KEYS[1], 'cancelled')
return 1
