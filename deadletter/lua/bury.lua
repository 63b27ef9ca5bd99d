-- include: fence, payload, retention, on_end, watched, streams, tag, turns
-- Settle a delivery by turning the task into a dead letter.
-- KEYS  ready stream, record, steps, log, dead-letter stream, inbox, control, retentions, timeline, outbox, record
--       of the clean-up task if it has one
-- ARGV  fence (4), last entry (see gap), task id, task name, reason, evidence (JSON), attempts, crashes, retention in
--       milliseconds, the same rounded up to one that is registered, '1' if the message is not an envelope and its raw
--       fields are kept (the first 500: Lua cannot pass more than some thousand values to one command), id, envelope and
--       arguments of the clean-up task ('' without one), then the changes of the checkpoint for the next attempt (see
--       end_attempt)
-- returns  0 refused, the lease has passed; 1 buried; 3 buried, and its notice is in the outbox; 2 nothing was done, for the cancellation of the task was requested:
--          the caller stores that it was cancelled; -1 - N refused, see gap
-- Atomic: the message leaves the ready stream in the script that moves the payload from the record to the dead-letter
-- stream, with the evidence, and enqueues the clean-up task.
-- The checkpoint is kept for a replay until the retention has passed. The inbox gets its TTL here even
-- if it was empty: a message to a dead letter is stored without a TTL of its own. A log without an id left (hence pcall)
-- does not stop the burial in its middle.
if not owned(KEYS[1]) then
  return settled(KEYS[2]) and (is_watched(KEYS[2]) and 3 or 1) or 0
end
if redis.call('HEXISTS', KEYS[7], 'cancel') == 1 then
  return 2
end
local lost = gap(KEYS[2], ARGV[5])
if lost then
  return lost
end
local now = now_ms()
local letter = {'id', ARGV[6], 'task', ARGV[7], 'reason', ARGV[8], 'evidence', ARGV[9],
  'attempts', ARGV[10], 'crashes', ARGV[11], 'worker', ARGV[2]}
local raw = ARGV[14] == '1'
local found = raw and redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
for i = 1, found and math.min(#found[2], 1000) or 0, 2 do
  letter[#letter + 1] = 'raw:' .. found[2][i]
  letter[#letter + 1] = found[2][i + 1]
end
-- a key of another type ends the script here, before its first write
if ARGV[18] then
  redis.call('HEXISTS', KEYS[3], '')
end
redis.call('XRANGE', KEYS[4], '0-0', '0-0')
redis.call('XRANGE', KEYS[5], '0-0', '0-0')
redis.call('HEXISTS', KEYS[6], '')
redis.call('ZSCORE', KEYS[8], '')
redis.call('ZSCORE', KEYS[9], '')
redis.call('ZSCORE', KEYS[10], '')
local streams = stream_keys(KEYS[2])
local tag, key_id, ring = line_of(KEYS[2], redis.call('HGET', KEYS[2], 'gate'), false)
begin_outcome(KEYS[1], KEYS[2])
local envelope, arguments = payload(KEYS[2], ARGV[6])
if envelope and not raw then
  for _, part in ipairs({'env', envelope, 'args', arguments}) do
    letter[#letter + 1] = part
  end
end
register_retention(KEYS[8], ARGV[13], now)
redis.call('HSETNX', KEYS[2], 'at', string.match(ARGV[3], '^%d+'))
letter[#letter + 1] = 'at'
letter[#letter + 1] = redis.call('HGET', KEYS[2], 'at')
local entry = redis.call('XADD', KEYS[5], '*', unpack(letter))
redis.call('HSET', KEYS[2], 'state', 'dead', 'dead', entry, 'reason', ARGV[8], 'error', ARGV[9],
  'attempts', ARGV[10], 'crashes', ARGV[11], 'finished', now, 'worker', ARGV[2])
redis.call('HDEL', KEYS[2], 'env', 'args', 'task', 'app')
close(KEYS[1], KEYS[2])
redis.call('ZADD', KEYS[9], 'NX', redis.call('HGET', KEYS[2], 'at'), ARGV[6])
redis.call('PEXPIRE', KEYS[9], 2592000000)
redis.pcall('XADD', KEYS[4], '*', 'type', 'buried', 'data', ARGV[9])
local watched = is_watched(KEYS[2])
if watched then
  redis.call('HSET', KEYS[2], 'kept', ARGV[12] .. ' ' .. ARGV[13])
  put_notice(KEYS[10], ARGV[6], now)
else
  redis.call('PEXPIRE', KEYS[2], ARGV[12])
end
redis.call('PEXPIRE', KEYS[3], ARGV[12])
redis.call('PEXPIRE', KEYS[4], ARGV[12])
redis.call('HSETNX', KEYS[6], 'sent', 0)
redis.call('PEXPIRE', KEYS[6], ARGV[12])
expire_streams(streams, ARGV[12])
redis.call('DEL', KEYS[7])
if KEYS[11] then
  redis.call('HSET', KEYS[2], 'cleanup', ARGV[15])
  enqueue_cleanup(KEYS[1], KEYS[9], KEYS[11], ARGV[15], ARGV[16], ARGV[17])
end
if tag then
  leave_line(tag, ARGV[6], key_id, ring, now)
end
redis.call('PUBLISH', KEYS[2], 'dead')
end_attempt(KEYS[2], KEYS[3], 18, ARGV[12])
return watched and 3 or 1
