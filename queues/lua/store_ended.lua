-- include: retention, upload
-- Store a task that has ended on another deployment, for reading: its record, steps, log and inbox were uploaded before.
-- KEYS  record, steps, log, inbox, uploads of record, of steps, of log, of inbox, closed mark, timeline, retentions, dead letters
-- ARGV  token of this call, id, retention in milliseconds, the same rounded up to one that is registered, number of the
--       fields of the record, of the fields of the checkpoint, of the entries of the log, of the fields of the inbox, then
--       names and values of its dead letter if it is one
-- returns  1 stored, now or by the same call before; 0 the id belongs to another task; -1 the partition is closed; nil an
--          upload is not complete
-- Atomic: the task appears with all that it has left, and with its letter. Idempotent: the record has the token. A task that
-- is known stays known after the partition was closed: the reply that said so was lost.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return redis.call('HGET', KEYS[1], 'forked') == ARGV[1] and 1 or 0
end
if redis.call('EXISTS', KEYS[9]) == 1 then
  return -1
end
if redis.call('HLEN', KEYS[5]) ~= tonumber(ARGV[5]) or redis.call('HLEN', KEYS[6]) ~= tonumber(ARGV[6])
  or redis.call('XLEN', KEYS[7]) ~= tonumber(ARGV[7]) or redis.call('HLEN', KEYS[8]) ~= tonumber(ARGV[8]) then
  return false
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[10], '')
redis.call('ZSCORE', KEYS[11], '')
redis.call('XRANGE', KEYS[12], '0-0', '0-0')
replace(KEYS[1], KEYS[5], ARGV[5])
replace(KEYS[2], KEYS[6], ARGV[6])
replace(KEYS[3], KEYS[7], ARGV[7])
replace(KEYS[4], KEYS[8], ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[3])
redis.call('HSET', KEYS[1], 'forked', ARGV[1])
if ARGV[9] then
  redis.call('HSET', KEYS[1], 'dead', redis.call('XADD', KEYS[12], '*', unpack(ARGV, 9)))
  -- as in bury.lua: a message to a dead letter is stored without a TTL of its own
  redis.call('HSETNX', KEYS[4], 'sent', 0)
  redis.call('PEXPIRE', KEYS[4], ARGV[3])
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
register_retention(KEYS[11], ARGV[4], now)
redis.call('ZADD', KEYS[10], now, ARGV[2])
redis.call('PEXPIRE', KEYS[10], 2592000000)
return 1
