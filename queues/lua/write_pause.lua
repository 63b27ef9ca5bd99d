-- Store a rule that pauses a queue or tasks, or remove it.
-- KEYS  pauses of the namespace
-- ARGV  revision as the caller has read it (0 for none), token of this call, field of the rule, its value ('' removes the
--       rule), largest number of rules
-- returns  1 changed, 0 the rules were changed since they were read, -1 there are too many rules
-- Atomic: the rule and the revision. Idempotent: the token tells whether this call has made the change already, and bytes
-- that arrive late find another revision, so that they pause nothing that was resumed since. The revision only grows,
-- and the number of a rule is the revision that stored it: a rule that is stored again has another number. A rule is
-- removed before anything is written, which a full server accepts; revision and token stay, so the hash does as well.
local stored = redis.call('HMGET', KEYS[1], 'revision', 'token')
if stored[2] == ARGV[2] then
  return 1
elseif (tonumber(stored[1] or '') or 0) ~= tonumber(ARGV[1]) then
  return 0
elseif ARGV[4] ~= '' and redis.call('HLEN', KEYS[1]) >= ARGV[5] + 2 then
  return -1
end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[1], ARGV[3])
end
redis.call('HSET', KEYS[1], 'revision', string.format('%.0f', ARGV[1] + 1), 'token', ARGV[2])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
end
return 1
