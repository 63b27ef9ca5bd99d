-- Claim the token of a wait, or free it.
-- KEYS  token
-- ARGV  what it refers to, encrypted ('' frees the token), what the caller has read of it ('' if it was free),
--       milliseconds for which it is kept
-- returns  what it refers to, if that is not what the caller has read: nothing has changed; else nil
-- Idempotent: a claim that is repeated after a lost reply finds itself.
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[2] and held ~= ARGV[1] then
  return held
elseif ARGV[1] ~= '' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
elseif held then
  redis.call('DEL', KEYS[1])
end
return false
