-- End a turn of a session once, and claim the next one if a message waits.
-- KEYS  session, history, due, timeline
-- ARGV  digest of the session, time of its first message, turn, outcome ('answered', 'cancelled', 'failed' or 'refused'), answer or
--       reason, state or '' to keep it, time at which a commitment falls due or '', message about it, largest number of
--       turns in the history, link of the workspace or '' to keep it, basis that the caller has read, basis that the turn
--       leaves or '' if it cannot be made, serial number of the corrections in the state or '' to keep them
-- returns  {'ended', last claimed turn, last ended turn}; {'failed', turn, last ended turn}; {'early', now}: the turn is not
--          claimed, Redis has lost its claim; {'missing'}: the session was forgotten; {'changed'}: another basis is stored
-- Atomic: state, history and the claim of the next turn change together. Compare-and-set: a turn that has ended, or was
-- passed over, is not ended again, so a late run of it cannot write after the next turn was claimed. A turn that failed stays
-- claimed, with its message, until it is replayed or passed over. The corrections that its run has read go with the state that
-- it stores; later ones have another number. Where the basis of the turn before cannot be read, it stays: then no turn can
-- follow. The first write frees memory, so that a full server lets the others through (see fence.lua): the end of a turn must not wait for the memory
-- that it may free.
local known = redis.call('HMGET', KEYS[1], 'born', 'sent', 'turn', 'ended', 'basis')
local turn, ended, n = tonumber(known[3] or 0), tonumber(known[4] or 0), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if known[1] ~= ARGV[2] then
  return {'missing'}
elseif n > turn then
  return {'early', string.format('%.0f', now)}
elseif ended >= n then
  return {'ended', tostring(turn), tostring(ended)}
elseif ARGV[4] ~= 'failed' and (known[5] or '') ~= ARGV[11] then
  return {'changed'}
end
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[2], '0-0', '0-0')
redis.call('ZSCORE', KEYS[3], '')
redis.call('ZSCORE', KEYS[4], '')
redis.call('HDEL', KEYS[1], 'failed')
redis.call('ZADD', KEYS[4], now, ARGV[1])
if ARGV[4] == 'failed' then
  redis.call('HSET', KEYS[1], 'failed', ARGV[5], 'at', now)
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('PUBLISH', KEYS[1], 'failed')
  return {'failed', tostring(turn), tostring(ended)}
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[9], n .. '-0', 'at', now, 'message', redis.call('HGET', KEYS[1], 'm:' .. n) or '',
  ARGV[4] == 'answered' and 'answer' or 'error', ARGV[5])
redis.call('HDEL', KEYS[1], 'm:' .. n, 'i:' .. n, 'wake')
redis.call('HSET', KEYS[1], 'ended', n, 'at', now)
if ARGV[6] ~= '' then
  local serial = string.match(redis.call('HGET', KEYS[1], 'corrections') or '', '^(%d+) ')
  if serial and serial == ARGV[13] then
    redis.call('HDEL', KEYS[1], 'corrections')
  end
  redis.call('HSET', KEYS[1], 'state', ARGV[6])
end
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[1], 'basis', ARGV[12])
end
if (ARGV[10] or '') ~= '' then
  redis.call('HSET', KEYS[1], 'workspace', ARGV[10])
end
if tonumber(known[2]) > n then
  turn = n + 1
  redis.call('HSET', KEYS[1], 'turn', turn, 'claimed', now)
  redis.call('ZADD', KEYS[3], now + 60000, ARGV[1])
elseif ARGV[7] ~= '' then
  redis.call('HSET', KEYS[1], 'wake', ARGV[8])
  redis.call('ZADD', KEYS[3], ARGV[7], ARGV[1])
else
  redis.call('ZREM', KEYS[3], ARGV[1])
end
redis.call('PUBLISH', KEYS[1], 'ended')
return {'ended', tostring(turn), tostring(n)}
