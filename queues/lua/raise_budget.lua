-- Raise a budget, or begin it again.
-- KEYS  ledger, tasks that wait for the budget
-- ARGV  number of the raises as the caller has read it, token of this call, '1' to begin it again: what was
--       spent is kept as a total only, and raises are forgotten; who does it, encrypted; then amounts to
--       add: tokens, usd, steps, seconds
-- returns  {1, number of the raises, tasks that wait}; {0} it was raised since the caller has read it; {-1} there is no
--          ledger
-- Atomic: amounts, number and who asks. Idempotent: the token tells whether this call has made the change already, and bytes
-- that arrive late find another number. A window keeps its end.
local UNITS = {'tokens', 'usd', 'steps', 'seconds'}
local stored = redis.call('HMGET', KEYS[1], 'number', 'act')
local waiting = redis.call('ZRANGE', KEYS[2], 0, -1)
if not stored[1] then
  return {-1}
elseif stored[2] == ARGV[2] then
  return {1, stored[1], waiting}
elseif stored[1] ~= ARGV[1] then
  return {0}
end
local number = string.format('%.0f', (tonumber(stored[1]) or 0) + 1)
redis.call('HSET', KEYS[1], 'number', number, 'act', ARGV[2], 'by', ARGV[4])
for i = 1, 4 do
  local spent = redis.call('HGET', KEYS[1], 'spent_' .. UNITS[i])
  if ARGV[3] == '1' then
    if spent then
      local before = tonumber(redis.call('HGET', KEYS[1], 'total_' .. UNITS[i]) or '') or 0
      redis.call('HSET', KEYS[1], 'total_' .. UNITS[i], string.format('%.0f',
        math.min(before + (tonumber(spent) or 0), 9007199254740992)))
    end
    redis.call('HDEL', KEYS[1], 'spent_' .. UNITS[i], 'raised_' .. UNITS[i])
  end
  if ARGV[4 + i] ~= '' then
    local raised = tonumber(redis.call('HGET', KEYS[1], 'raised_' .. UNITS[i]) or '') or 0
    redis.call('HSET', KEYS[1], 'raised_' .. UNITS[i], string.format('%.0f',
      math.min(raised + ARGV[4 + i], 9007199254740992)))
  end
end
redis.call('HDEL', KEYS[1], 'noticed', 'asker')
return {1, number, waiting}
