-- include: streams
-- Replay a dead letter: put it back on its queue with its counters at zero.
-- KEYS  dead-letter stream, record, steps, log, ready stream, inbox, timeline
-- ARGV  entry id of the dead letter, '1' for a fresh start without the checkpoint (the numbers of idempotency keys after
--       ctx.forget stay: a payment that was refunded is no new one), new arguments (JSON, '' keeps them), '1' if the id
--       is in no other partition, id, and for a fresh start of encrypted data what the caller has read, the numbers of the last
--       event and of the last entry, with the head of a hash chain that starts there
-- returns  0 no such dead letter (it was replayed or purged), or its id was enqueued again after the record had
--          expired; 1 replayed; -1 the record has expired: first find out whether the id was enqueued again in another
--          partition; -2 the numbers have changed: read them again
-- Atomic: the task leaves the dead-letter stream in the script that adds it to the ready stream. A message that is not
-- a task was buried under a made-up id (unreadable-...): its record is deleted. New arguments replace the chunks of large
-- ones, too. A log without an id left (hence pcall) does not stop the replay in its middle. A fresh start voids the items of the
-- streams, which keep their numbers, by a mark.
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not found then
  return 0
end
local holder = redis.call('HMGET', KEYS[2], 'state', 'dead')
if holder[1] and holder[2] ~= ARGV[1] then
  return 0
end
if not holder[1] and ARGV[4] ~= '1' then
  return -1
end
if ARGV[6] then
  local known = redis.call('HMGET', KEYS[2], 'events', 'entries')
  if (known[1] or '0') ~= ARGV[6] or (known[2] or '0') ~= ARGV[7] then
    return -2
  end
end
local message, nameless, former = {'again', '1'}, false, nil
for i = 1, #found[2], 2 do
  local name, value = found[2][i], found[2][i + 1]
  local raw = string.match(name, '^raw:(.*)$')
  former = (raw or name) == 'args' and value or former
  nameless = nameless or (name == 'id' and string.sub(value, 1, 11) == 'unreadable-')
  if raw and raw ~= 'again' then
    message[#message + 1] = raw
    message[#message + 1] = (raw == 'args' and ARGV[3] ~= '') and ARGV[3] or value
  elseif name == 'env' then
    message[#message + 1] = 'env'
    message[#message + 1] = value
  elseif name == 'args' then
    message[#message + 1] = 'args'
    message[#message + 1] = ARGV[3] ~= '' and ARGV[3] or value
  end
end
if ARGV[3] ~= '' and former then
  local digest, chunks = string.match(former, '^#.*"digest":"(%x+)".*"chunks":(%d+)')
  for chunk = 0, (chunks or 0) - 1 do
    redis.call('HDEL', KEYS[2], 'args:' .. digest .. ':' .. chunk)
  end
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[4], '0-0', '0-0')
redis.call('ZSCORE', KEYS[7], '')
local streams = stream_keys(KEYS[2])
local entry = redis.call('XADD', KEYS[5], '*', unpack(message))
redis.call('XDEL', KEYS[1], ARGV[1])
if nameless then
  redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[6], unpack(streams))
  redis.call('ZREM', KEYS[7], ARGV[5])
  return 1
end
redis.call('HSET', KEYS[2], 'state', 'queued', 'entry', entry, 'attempts', 0, 'crashes', 0, 'returns', 0)
for i = 3, #message, 2 do
  if message[i] == 'env' or message[i] == 'args' then
    redis.call('HSET', KEYS[2], message[i], message[i + 1])
  end
end
redis.call('HSETNX', KEYS[2], 'at', string.match(entry, '^%d+'))
redis.call('HINCRBY', KEYS[2], 'replays', 1)
if not holder[1] then
  redis.call('ZADD', KEYS[7], string.match(entry, '^%d+'), ARGV[5])
end
redis.call('PEXPIRE', KEYS[7], 2592000000)
redis.call('HDEL', KEYS[2], 'dead', 'reason', 'error', 'finished', 'result', 'settled', 'excused', 'recent',
  'recent_at', 'crash', 'newer_since', 'gate')
redis.pcall('XADD', KEYS[4], '*', 'type', 'replayed', 'data', ARGV[2] == '1' and '{"fresh":true}' or '{"fresh":false}')
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[2], 'edited', '1')
end
if ARGV[2] == '1' then
  if redis.call('HEXISTS', KEYS[3], 's:#forgotten') + redis.call('HEXISTS', KEYS[3], 's:#used') > 0 then
    for _, field in ipairs(redis.call('HKEYS', KEYS[3])) do
      if field ~= 's:#forgotten' and field ~= 's:#used' then
        redis.call('HDEL', KEYS[3], field)
      end
    end
    redis.call('PERSIST', KEYS[3])
  else
    redis.call('DEL', KEYS[3])
  end
  redis.call('HDEL', KEYS[2], 'handed_to', 'progress', 'progress_at', 'head')
  if ARGV[8] then
    redis.call('HSET', KEYS[2], 'head', ARGV[8])
  end
end
redis.call('PERSIST', KEYS[2])
if ARGV[2] ~= '1' then
  redis.call('PERSIST', KEYS[3])
end
redis.call('PERSIST', KEYS[4])
redis.call('PERSIST', KEYS[6])
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
for _, key in ipairs(streams) do
  redis.call('PERSIST', key)
  local last = ARGV[2] == '1' and redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if last then
    local number = string.format('%.0f', string.match(last[1], '^%d+') + 1)
    redis.pcall('XADD', key, number .. '-0', 't', now, 'u', '', 'y', 0, 'cut', 'all')
    redis.call('PUBLISH', key, number)
  end
end
redis.call('PUBLISH', KEYS[2], 'replayed')
return 1
