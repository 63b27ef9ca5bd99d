-- Charge what a task has spent to the ledger of a budget, or look at it.
-- KEYS  ledger, nonces of its charges, index of named ledgers
-- ARGV  id of the ledger, nonce of the charge ('' only looks), milliseconds of the window ('' for ever), milliseconds for
--       which a ledger without a window is kept after a charge, '1' if the index lists it, encrypted text of its key ('' for
--       none), then of each unit the limit ('' for none) and the amount: tokens, usd, steps, seconds
-- returns  number of the raises, ms at which the window ends ('' for ever), '1' if most of a limit is used and this call is to say
--          so, then of each unit what is spent and by how much the limit was raised
-- Atomic: a charge and its nonce. Idempotent: a nonce charges once, for an hour, which is longer than bytes are on their
-- way, or until 100,000 later charges; a repeated call that follows a lost reply returns the same notice. A window begins
-- with its first charge and ends with the TTL of the ledger, also if another app that shares it has no window; the next one
-- has another number. A look writes nothing.
local UNITS = {'tokens', 'usd', 'steps', 'seconds'}
local function text(number)
  return string.format('%.0f', number)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- a key of another type ends the script here, before its first write
local stored = redis.call('HMGET', KEYS[1], 'number', 'noticed', 'kept', 'spent_tokens', 'spent_usd', 'spent_steps',
  'spent_seconds', 'raised_tokens', 'raised_usd', 'raised_steps', 'raised_seconds', 'ends')
local known = redis.call('ZSCORE', KEYS[2], ARGV[2])
redis.call('ZSCORE', KEYS[3], '')
local function count(at)
  return tonumber(string.match(stored[at] or '', '^%d+$')) or 0
end
-- numbers of windows are times, so that an answer about one window says nothing about the next
local number = stored[1] and count(1) or (ARGV[3] ~= '' and ARGV[2] ~= '' and now or 0)
local charges = ARGV[2] ~= '' and not known
local spent, raised, most = {}, {}, false
for i = 1, 4 do
  local limit, amount = tonumber(ARGV[5 + 2 * i]), tonumber(ARGV[6 + 2 * i]) or 0
  spent[i], raised[i] = math.min(count(3 + i) + (charges and amount or 0), 9007199254740992), count(7 + i)
  if limit and spent[i] >= 0.8 * (limit + raised[i]) then
    most = true
  end
end
local notice = ''
if ARGV[2] ~= '' and most then
  local at, nonce = string.match(stored[2] or '', '^(%d+) (.*)$')
  if at ~= text(number) or nonce == ARGV[2] then
    notice = '1'
  end
end
if charges then
  redis.call('HSET', KEYS[1], 'number', text(number), 'at', text(now))
  for i = 1, 4 do
    if ARGV[6 + 2 * i] ~= '' then
      redis.call('HSET', KEYS[1], 'spent_' .. UNITS[i], text(spent[i]))
    end
    if ARGV[5 + 2 * i] ~= '' then
      redis.call('HSET', KEYS[1], 'limit_' .. UNITS[i], ARGV[5 + 2 * i])
    end
  end
  if notice == '1' then
    redis.call('HSET', KEYS[1], 'noticed', text(number) .. ' ' .. ARGV[2])
  end
  if ARGV[6] ~= '' then
    redis.call('HSET', KEYS[1], 'label', ARGV[6])
  end
  if ARGV[3] == '' and not stored[12] then
    redis.call('PEXPIRE', KEYS[1], count(3) > 0 and stored[3] or ARGV[4])
  elseif not stored[12] then
    stored[12] = text(now + ARGV[3])
    redis.call('HSET', KEYS[1], 'ends', stored[12])
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. text(now - 3600000))
  redis.call('ZADD', KEYS[2], text(now), ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -100001)
  redis.call('PEXPIRE', KEYS[2], 3600000)
  if ARGV[5] == '1' then
    redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', '(' .. text(now - ARGV[4]))
    redis.call('ZADD', KEYS[3], text(now), ARGV[1])
    redis.call('PEXPIRE', KEYS[3], ARGV[4])
  end
end
local reply = {text(number), stored[12] or '', notice}
for i = 1, 4 do
  reply[2 * i + 2], reply[2 * i + 3] = text(spent[i]), text(raised[i])
end
return reply
