-- Add entries to the log of a task that is not stored yet.
-- KEYS  upload
-- ARGV  milliseconds until the upload expires, number of entries before these, then per entry its id, the number of its
--       fields, and these with their values
-- returns  1 added, now or by the same call before; 0 the entries before these are gone: the upload has expired
-- Atomic: nothing is stored without a TTL, so that nothing is left of a caller that dies before it stores the task.
-- Idempotent: the number of entries tells whether these are there already.
local known = redis.call('XLEN', KEYS[1])
if known ~= tonumber(ARGV[2]) then
  return known > tonumber(ARGV[2]) and 1 or 0
end
local at = 3
while at <= #ARGV do
  local last = at + 1 + 2 * tonumber(ARGV[at + 1])
  redis.call('XADD', KEYS[1], ARGV[at], unpack(ARGV, at + 2, last))
  at = last + 1
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
