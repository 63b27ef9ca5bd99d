-- Claim the marker of a unique key, change it, or free it.
-- KEYS  marker
-- ARGV  whose it becomes, encrypted ('' frees it), what the caller has read of it ('' if it was free), milliseconds for
--       which it is kept, '1' if they count from the claim that the caller has read
-- returns  1 and the time of the claim in ms; or 0, the time of Redis in ms, and the marker: it is not what the caller has
--          read, and nothing has changed
-- A marker is the time of its claim, a space, and whose it is. Atomic: it gets its TTL in the script that compares and
-- stores it. Idempotent: a claim that is repeated after a lost reply finds itself. GETSET and GETEX refuse keys of other
-- types: a producer that may run them can neither replace nor delete a record, as it could with SET and PEXPIRE.
local held = redis.call('GETEX', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at, holder
if held then
  at, holder = string.match(held, '^(%d+) (.*)$')
end
if held and holder == ARGV[1] then
  return {1, tonumber(at)}
elseif (held or '') ~= ARGV[2] then
  return {0, now, held or ''}
elseif ARGV[1] == '' then
  redis.call('DEL', KEYS[1])
  return {1, now}
end
local since = ARGV[4] == '1' and at or now
redis.call('GETSET', KEYS[1], string.format('%.0f', since) .. ' ' .. ARGV[1])
redis.call('GETEX', KEYS[1], 'PX', string.format('%.0f', math.max(1, since + ARGV[3] - now)))
return {1, tonumber(since)}
