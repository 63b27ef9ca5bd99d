-- include: upload
-- Store a task with the past that it had on another deployment: its checkpoint, inbox, log, record and message.
-- KEYS  ready stream, mark of a closed partition, record, steps, log, timeline, inbox, upload
-- ARGV  envelope, arguments, token of this call, id, number of the last event, of the last entry, data format or '',
--       number of fields of the checkpoint, of the inbox, then those fields and their values, then per entry of the log
--       its id, the number of its fields, and these with their values
-- returns  1 stored, now or by the same call before; 0 the id belongs to a task; -1 the partition is closed; nil the
--          upload of large arguments, if the caller names one, is not complete (see upload.lua)
-- Atomic: no worker sees the message without the past. Idempotent: the record has the token.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return redis.call('HGET', KEYS[3], 'forked') == ARGV[3] and 1 or 0
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
if KEYS[8] and not complete(KEYS[8], ARGV[2]) then
  return false
end
if KEYS[8] then
  take_upload(KEYS[8], KEYS[3])
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2], 'again', '1')
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'events', ARGV[5], 'entries', ARGV[6], 'forked', ARGV[3])
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[3], 'format', ARGV[7])
end
redis.call('ZADD', KEYS[6], string.match(entry, '^%d+'), ARGV[4])
redis.call('PEXPIRE', KEYS[6], 2592000000)
redis.call('DEL', KEYS[4], KEYS[5], KEYS[7])
local at = 10
for _ = 1, tonumber(ARGV[8]) do
  redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
  at = at + 2
end
for _ = 1, tonumber(ARGV[9]) do
  redis.call('HSET', KEYS[7], ARGV[at], ARGV[at + 1])
  at = at + 2
end
while at <= #ARGV do
  local last = at + 1 + 2 * tonumber(ARGV[at + 1])
  redis.call('XADD', KEYS[5], ARGV[at], unpack(ARGV, at + 2, last))
  at = last + 1
end
return 1
