-- Begin or resume the run of a claimed turn: read its message and the state that the turns before it left.
-- KEYS  session, due
-- ARGV  digest of the session, time of its first message, turn
-- returns  {'runs', message, state or '', time of the claim, link of the workspace or '', corrections or '',
--          basis or ''};
--          {'ended', last claimed turn}: the turn has ended or was passed over; {'early', now}: the turn is not claimed,
--          Redis has lost its claim; {'missing'}: the session was forgotten
-- Atomic: a failed turn that is replayed runs again, unless a later turn was started. Idempotent.
local known = redis.call('HMGET', KEYS[1], 'born', 'turn', 'ended', 'm:' .. ARGV[3], 'state', 'claimed', 'workspace',
  'corrections', 'basis')
if known[1] ~= ARGV[2] then
  return {'missing'}
elseif tonumber(ARGV[3]) > tonumber(known[2] or 0) then
  local time = redis.call('TIME')
  return {'early', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))}
elseif tonumber(known[3] or 0) >= tonumber(ARGV[3]) then
  return {'ended', known[2]}
end
if redis.call('HDEL', KEYS[1], 'failed') == 1 then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + 60000, ARGV[1])
end
return {'runs', known[4] or '', known[5] or '', known[6], known[7] or '', known[8] or '', known[9] or ''}
