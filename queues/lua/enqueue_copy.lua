-- include: upload
-- Store a copy of a task with its past, which was uploaded before: a fork, or a task of another deployment.
-- KEYS  ready stream, closed mark, record, timeline, steps, log, inbox, uploads of steps, of log, of inbox, due set, nudge stream, upload of arguments
-- ARGV  envelope, arguments, source (what it is a copy of, or a token of this call), id, number of the last event, of the
--       last entry, data format or '', number of the fields of the checkpoint, of the entries of the log, of the fields of
--       the inbox, time in ms of Redis' clock until which the copy is not due, '' for none,
--       head of the hash chain ('' without a key)
-- returns  1 stored, now or by the same call before; 0 the id belongs to another task; -1 the partition is closed; nil an
--          upload is not complete; the caller names that of large arguments only if there are any
-- Atomic: no worker sees the message without the past. Idempotent: the record has the source. A copy that is known stays
-- known after the partition was closed: the reply that said so was lost.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return redis.call('HGET', KEYS[3], 'forked') == ARGV[3] and 1 or 0
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
if redis.call('HLEN', KEYS[8]) ~= tonumber(ARGV[8]) or redis.call('XLEN', KEYS[9]) ~= tonumber(ARGV[9])
  or redis.call('HLEN', KEYS[10]) ~= tonumber(ARGV[10]) or (KEYS[13] and not complete(KEYS[13], ARGV[2])) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[1], '0-0', '0-0')
redis.call('ZSCORE', KEYS[4], '')
redis.call('ZSCORE', KEYS[11], '')
if KEYS[13] then
  take_upload(KEYS[13], KEYS[3])
end
replace(KEYS[5], KEYS[8], ARGV[8])
replace(KEYS[6], KEYS[9], ARGV[9])
replace(KEYS[7], KEYS[10], ARGV[10])
local time = redis.call('TIME')
local now, due = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[11])
redis.call('HSET', KEYS[3], 'at', now, 'env', ARGV[1], 'args', ARGV[2], 'events', ARGV[5], 'entries', ARGV[6],
  'forked', ARGV[3])
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[3], 'head', ARGV[12])
end
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[3], 'format', ARGV[7])
end
if due and due > now then
  local first = redis.call('ZRANGE', KEYS[11], 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', KEYS[11], due, ARGV[4])
  redis.call('HSET', KEYS[3], 'state', 'scheduled', 'due', due)
  if not first or due < tonumber(first) then
    redis.call('XADD', KEYS[12], 'MAXLEN', 16, '*', 'why', 'due')
  end
else
  local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2], 'again', '1')
  redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry)
end
redis.call('ZADD', KEYS[4], now, ARGV[4])
redis.call('PEXPIRE', KEYS[4], 2592000000)
return 1
