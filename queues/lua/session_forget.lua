-- Delete a session with its history.
-- KEYS  session, history, due, timeline, forgotten sessions, time of the last call of this script
-- ARGV  digest of the session, time of its first message or '' if the caller has found none, milliseconds for which it must
--       have been idle or '': then the tasks of its turns are to be deleted, too, and it is noted among the forgotten sessions
-- returns  1 deleted, now or by the same call before; 0 there is no such session, or it is not idle
-- Atomic: a session that a message has reached since the caller read it is not taken for an idle one. If the caller dies
-- before it has deleted the tasks, a worker finds the note, and deletes them. Idempotent: the note tells a repeated call
-- that the session was there. A run of
-- its last turn cannot write to a session of the same name that begins afterwards, since that one has another first time; nor
-- does a repeated call that arrives late delete it. For an hour the time of this call is kept, which is not earlier than the
-- first time, so that a late message of the forgotten session does not begin it again.
local known = redis.call('HMGET', KEYS[1], 'born', 'turn', 'ended', 'failed', 'at')
if not known[1] then
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
end
if known[1] ~= ARGV[2] then
  return ARGV[3] == '' and redis.call('HEXISTS', KEYS[5], ARGV[1] .. ' ' .. ARGV[2]) or 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[3] ~= '' then
  local idle = now - tonumber(known[5])
  local ran = (known[2] or '0') ~= (known[3] or '0') and not known[4]
  if ran or idle < tonumber(ARGV[3]) then
    return 0
  end
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[4], '')
redis.call('HEXISTS', KEYS[5], '')
local last = tonumber(redis.call('HGET', KEYS[6], 'at') or 0) or 0
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[6], 'at', string.format('%.0f', math.max(now, last, tonumber(known[1]) or 0)))
redis.call('PEXPIRE', KEYS[6], 3600000)
if ARGV[3] == '' then
  redis.call('HSET', KEYS[5], ARGV[1] .. ' ' .. known[1], known[2] or '0')
end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('PUBLISH', KEYS[1], 'forgotten')
return 1
