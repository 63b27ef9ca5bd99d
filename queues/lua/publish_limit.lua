-- include: limits
-- Publish definitions of limits, or renew them; remove tokens that have expired.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  largest step of the virtual clock in ms, app, '1' at the start of a worker, then of each limit: name, digest of its
--       definition, number of fields and values, these
-- returns  of each limit the app that has published another definition, '' if none has
-- Atomic per limit. The definition of the worker that has started last stays: a renewal replaces only one of the same app and
-- digest, or none. What scripts write beside it (hold, breaker) and what operators have set stays in any case.
local virtual = tick(tonumber(ARGV[1]))
local others = {}
local at = 4
while at <= #ARGV do
  local name, digest, size = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local where = TAG .. 'limit:' .. name
  local known = redis.call('HMGET', where, 'digest', 'app')
  others[#others + 1] = known[1] and known[1] ~= digest and known[2] ~= ARGV[2] and known[2] or ''
  if not known[1] or known[1] ~= digest and ARGV[3] == '1' then
    redis.call('HDEL', where, 'rate', 'cost', 'by', 'over', 'ordered', 'while_parked', unpack(FIELDS))
    redis.call('HSET', where, 'digest', digest, 'app', ARGV[2], 'at', text(NOW), unpack(ARGV, at + 3, at + 2 + size))
  end
  local held = tonumber(redis.call('HGET', where, 'hold') or '') or 0
  redis.call('PEXPIRE', where, text(math.max(KEPT, held - NOW)))
  drop_expired(name, virtual)
  at = at + 3 + size
end
return others
