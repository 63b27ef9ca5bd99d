-- Look at a session that is due: claim a turn for a commitment that fell due, or set the time of the next look.
-- KEYS  session, due, timeline
-- ARGV  digest of the session
-- returns  {time of its first message, last claimed turn, last ended turn} if a turn is claimed, else {}
-- Atomic: the message about the commitment is taken and its turn claimed in one act, and only by one worker. A turn that
-- has been claimed for long is looked at less often, at least once an hour.
local known = redis.call('HMGET', KEYS[1], 'born', 'sent', 'turn', 'ended', 'failed', 'claimed', 'wake')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local score = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or now + 1)
if score > now then
  return {}
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
local turn, ended = tonumber(known[3]) or 0, tonumber(known[4]) or 0
if turn == ended and known[7] then
  local sent = (tonumber(known[2]) or ended) + 1
  turn = ended + 1
  redis.call('HSET', KEYS[1], 'm:' .. sent, now .. ' ' .. known[7], 'sent', sent, 'turn', turn, 'claimed', now, 'at', now)
  redis.call('HDEL', KEYS[1], 'wake')
  redis.call('ZADD', KEYS[2], now + 60000, ARGV[1])
  redis.call('ZADD', KEYS[3], now, ARGV[1])
elseif turn == ended or known[5] then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return {}
else
  redis.call('ZADD', KEYS[2], now + math.min(3600000, math.max(60000, now - (tonumber(known[6]) or now))), ARGV[1])
end
return {known[1], tostring(turn), tostring(ended)}
