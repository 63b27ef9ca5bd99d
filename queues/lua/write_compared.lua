-- Change a hash that the caller has read: a schedule, a job, or the pauses of operators.
-- KEYS  hash, index of its kind if there is one
-- ARGV  name, revision as read (0 for none), token of this call, score in the index ('' as before, '-' for none),
--       milliseconds after which the hash is deleted ('' for never), milliseconds after which the index is deleted ('' as
--       before), then field and value of all that changes; an empty value deletes the field
-- returns  1 changed, 0 it was changed since it was read
-- Atomic: the fields and the score. Idempotent: the token tells whether this call has changed it already, and bytes that
-- arrive late find another revision. The revision only grows: of a removed hash it is kept for an hour. Fields are
-- deleted first, which a full server accepts, and then the rest (see fence.lua).
-- a key of another type ends the script here, before its first write
if KEYS[2] then
  redis.call('ZSCORE', KEYS[2], '')
end
local stored = redis.call('HMGET', KEYS[1], 'revision', 'token')
if stored[2] == ARGV[3] then
  return 1
elseif (tonumber(stored[1] or '') or 0) ~= tonumber(ARGV[2]) then
  return 0
end
for i = 7, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
redis.call('HSET', KEYS[1], 'revision', string.format('%.0f', ARGV[2] + 1), 'token', ARGV[3])
for i = 7, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
if ARGV[5] == '' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
if ARGV[4] == '-' then
  redis.call('ZREM', KEYS[2], ARGV[1])
elseif ARGV[4] ~= '' then
  redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
end
if ARGV[6] ~= '' then
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
end
return 1
