-- include: limits
-- Change what operators have set for a limit, and note who has done what.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  limit, number of the last change as the caller has read it, 0 for none, token of this change, ms of a hold (0 for
--       none), '1' to end every hold and to close the breaker ('' for neither), largest number of notes, encrypted note, then
--       fields and values ('' removes the field, '-' is no such number)
-- returns  {1, ms of Redis' clock until which the limit is held, 0 if it is not}; {0, 0} it was changed since it was read
-- Atomic: a change and its note, or neither. Tokens are not touched: a lower number takes nothing from what runs. An earlier
-- time never shortens a hold. Idempotent: the token tells whether this call has made the change already, and one that
-- arrives late replaces no later change. What holds no field any more is kept for an hour, for bytes that are still on
-- their way.
local where, defined, notes = TAG .. 'control:limit:' .. ARGV[1], TAG .. 'limit:' .. ARGV[1], TAG .. 'control:limits'
local known = redis.call('HMGET', where, 'change', 'act', 'hold')
local held = tonumber(redis.call('HGET', defined, 'hold') or '') or 0
redis.call('XLEN', notes)
local ends = tonumber(known[3] or '') or 0
if known[2] == ARGV[3] then
  return {1, math.max(held, ends)}
elseif (known[1] or '0') ~= ARGV[2] then
  return {0, 0}
end
if ARGV[5] == '1' then
  redis.call('HDEL', defined, 'hold', 'opened', 'probe', 'slot', 'c0', 'e0', 'c1', 'e1')
  held, ends = 0, 0
end
if ARGV[4] ~= '0' then
  ends = math.max(ends, NOW + ARGV[4])
end
redis.call('HSET', where, 'change', ARGV[2] + 1, 'act', ARGV[3], 'at', text(NOW), 'hold', text(ends))
for at = 8, #ARGV, 2 do
  if ARGV[at + 1] == '' then
    redis.call('HDEL', where, ARGV[at])
  else
    redis.call('HSET', where, ARGV[at], ARGV[at + 1])
  end
end
if redis.call('HLEN', where) > 4 then
  redis.call('PERSIST', where)
else
  redis.call('PEXPIRE', where, text(math.max(ends - NOW, 0) + 3600000))
end
redis.call('XADD', notes, 'MAXLEN', '~', ARGV[6], '*', 'limit', ARGV[1], 'note', ARGV[7])
redis.call('PEXPIRE', notes, 31536000000)
return {1, math.max(held, ends)}
