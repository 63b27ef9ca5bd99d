-- Store the corrections that wait for the next turn of a session, unless a turn runs.
-- KEYS  session, timeline
-- ARGV  digest of the session, time of its first message, corrections that the caller has read or '', corrections to
--       store, last ended turn that the caller has read
-- returns  {'stored'}; {'turn'}: a turn runs, or waits for a worker; {'changed'}: other corrections are stored, or a turn has
--          ended since; {'missing'}: the session was forgotten
-- Atomic: compare-and-set. A turn that is claimed later reads them when it begins, and its end removes them. A call that
-- arrives after that, repeated, finds a later turn ended: its corrections are not stored again.
local known = redis.call('HMGET', KEYS[1], 'born', 'turn', 'ended', 'failed', 'corrections')
if known[1] ~= ARGV[2] then
  return {'missing'}
elseif tonumber(known[2] or 0) > tonumber(known[3] or 0) and not known[4] then
  return {'turn'}
elseif (known[5] or '') ~= ARGV[3] or tonumber(known[3] or 0) ~= tonumber(ARGV[5]) then
  return {'changed'}
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[2], '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'corrections', ARGV[4], 'at', now)
redis.call('ZADD', KEYS[2], now, ARGV[1])
return {'stored'}
