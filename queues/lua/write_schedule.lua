-- Change a schedule that the caller has read.
-- KEYS  schedule, schedules of the namespace
-- ARGV  name, revision as read (0 for none), token of this call, ms of the next look ('' as before, '-' for none),
--       milliseconds after which the schedule is deleted ('' for never), then field and value of all that changes; an empty
--       value deletes the field
-- returns  1 changed, 0 it was changed since it was read
-- Atomic: the fields and the time of the next look. Idempotent: the token tells whether this call has changed it already,
-- and bytes that arrive late find another revision. The revision only grows: of a removed schedule it is kept for an hour.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[2], '')
local stored = redis.call('HMGET', KEYS[1], 'revision', 'token')
if stored[2] == ARGV[3] then
  return 1
elseif (tonumber(stored[1] or '') or 0) ~= tonumber(ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[1], 'revision', string.format('%.0f', ARGV[2] + 1), 'token', ARGV[3])
for i = 6, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
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
return 1
