-- Add a message to a session once, and claim a turn for the first waiting message unless a turn runs or has failed.
-- KEYS  session, history, due, timeline, time of the last call that forgot a session
-- ARGV  digest of the session, digest of the message id, message, largest number of waiting messages, number of a failed
--       turn to pass over or '', agent, id, queue or '' to keep it, inputs or '' without any, number of message ids that
--       are remembered, app or '' for any, largest size of the waiting messages in bytes, time of the first message and
--       number of this one, for which it was encrypted, '1' if it is encrypted as a first one, else '', basis that the
--       caller has read, basis that the passed turn leaves
-- returns  {'sent', its number, last claimed turn, last ended turn, time of the first message}; {'full', waiting messages,
--          their bytes}; {'failed', failed turn, reason, time of the first message}; {'app', app}: the session belongs to
--          another app; {'changed', time of the first message, number, '1' or ''}: of the message if it were stored now;
--          {'encrypted'}: the message is plain, and the data of the session is not
-- Atomic: the message is stored, its id is known, and a turn is claimed, all or none. Idempotent: after a lost reply it
-- answers with the first number, as long as no more messages followed than it remembers ids; after that its number is used,
-- so it stores nothing. The task of a claimed turn is stored by the caller; until the turn has ended, the session is due, so
-- that a worker stores the task if the caller died. A call of a forgotten session that arrives late does not begin it again:
-- the next one of the name has a later first time. Where another program has removed a session, but not its history, the
-- turns continue with the numbers there. A message is a first one if no turn has left a basis, and none waits.
-- `bytes` is an upper bound of the size of the waiting messages, which are measured if it is over the limit.
local known = redis.call('HMGET', KEYS[1], 'born', 'sent', 'turn', 'ended', 'failed', 'id:' .. ARGV[2], 'app', 'bytes',
  'basis')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local born = known[1] or ARGV[13]
local sent, turn, ended = tonumber(known[2] or 0), tonumber(known[3] or 0), tonumber(known[4] or 0)
if not known[1] then
  local forgotten = tonumber(redis.call('HGET', KEYS[5], 'at') or 0) or 0
  if (tonumber(born) or 0) <= forgotten then
    born = string.format('%.0f', math.max(now, forgotten + 1))
  end
  local latest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
  sent = latest and tonumber(string.match(latest[1], '^%d+')) or 0
  turn, ended = sent, sent
end
if known[7] and ARGV[11] ~= '' and known[7] ~= ARGV[11] then
  return {'app', known[7]}
end
if known[6] then
  return {'sent', known[6], tostring(turn), tostring(ended), born}
end
if known[5] and ARGV[5] ~= tostring(turn) then
  return {'failed', tostring(turn), known[5], born}
end
if string.byte(ARGV[3]) ~= 193 then
  local data = redis.call('HMGET', KEYS[1], 'state', 'basis', 'm:' .. sent)
  data[3] = string.match(data[3] or '', '^%d+ (.*)$')
  for i = 1, 3 do
    if string.byte(data[i] or '') == 193 then
      return {'encrypted'}
    end
  end
end
local waiting, size = sent - (known[5] and turn or ended), #ARGV[3] + #ARGV[9]
local limit, bytes = tonumber(ARGV[12]), tonumber(known[8] or waiting > 0 and ARGV[12] or 0) or tonumber(ARGV[12])
if waiting < tonumber(ARGV[4]) and bytes + size > limit then
  bytes = 0
  for number = sent - waiting + 1, sent do
    bytes = bytes + redis.call('HSTRLEN', KEYS[1], 'm:' .. number) + redis.call('HSTRLEN', KEYS[1], 'i:' .. number)
  end
end
if waiting >= tonumber(ARGV[4]) or bytes + size > limit then
  return {'full', tostring(waiting), tostring(bytes)}
end
local first = not known[9] and sent == ended and '1' or ''
if ARGV[13] ~= born or tonumber(ARGV[14]) ~= sent + 1 or ARGV[15] ~= first or known[5] and ARGV[16] ~= (known[9] or '') then
  return {'changed', born, tostring(sent + 1), first}
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[2], '0-0', '0-0')
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[4], '')
sent = sent + 1
redis.call('HSET', KEYS[1], 'm:' .. sent, now .. ' ' .. ARGV[3], 'id:' .. ARGV[2], sent, 'n:' .. sent, ARGV[2],
  'sent', sent, 'born', born, 'at', now, 'agent', ARGV[6], 'id', ARGV[7], 'bytes', (waiting > 0 and bytes or 0) + size)
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'queue', ARGV[8])
end
if ARGV[9] ~= '' then
  redis.call('HSET', KEYS[1], 'i:' .. sent, ARGV[9])
end
if ARGV[11] ~= '' then
  redis.call('HSET', KEYS[1], 'app', ARGV[11])
end
local oldest = 'n:' .. sent - tonumber(ARGV[10])
local digest = redis.call('HGET', KEYS[1], oldest)
if digest then
  redis.call('HDEL', KEYS[1], 'id:' .. digest, oldest)
end
if known[5] then
  redis.call('XADD', KEYS[2], turn .. '-0', 'at', now, 'message', redis.call('HGET', KEYS[1], 'm:' .. turn) or '',
    'error', known[5])
  redis.call('HDEL', KEYS[1], 'm:' .. turn, 'i:' .. turn, 'failed')
  ended = turn
  redis.call('HSET', KEYS[1], 'ended', ended, 'basis', ARGV[17])
end
if turn == ended then
  turn = ended + 1
  redis.call('HSET', KEYS[1], 'turn', turn, 'claimed', now, 'ended', ended)
  redis.call('ZADD', KEYS[3], now + 60000, ARGV[1])
end
redis.call('ZADD', KEYS[4], now, ARGV[1])
return {'sent', tostring(sent), tostring(turn), tostring(ended), born}
