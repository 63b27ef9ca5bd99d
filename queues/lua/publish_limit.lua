-- include: limits
-- Publish definitions of limits, or renew them; remove tokens that have expired.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  largest step of the virtual clock in ms, app, at the start of a worker the time of Redis in ms, else '', then of each
--       limit: name, digest of its definition, number of fields and values, these
-- returns  of each limit the app that has published another definition, '' if none has
-- Atomic per limit. The definition of the worker that has started last stays: a renewal replaces none, and neither do bytes
-- of a start that arrive late. What scripts write beside it (hold, breaker) and what operators have set stays in any case.
tick(tonumber(ARGV[1]))
local others, started = {}, tonumber(ARGV[3])
local at = 4
while at <= #ARGV do
  local name, digest, size = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local where = TAG .. 'limit:' .. name
  local known = redis.call('HMGET', where, 'digest', 'app', 'at')
  local before = tonumber(known[3] or '') or 0
  local later = started and (started >= before or before > NOW)
  others[#others + 1] = known[1] and known[1] ~= digest and known[2] ~= ARGV[2] and known[2] or ''
  if not known[1] or known[1] ~= digest and later then
    redis.call('HDEL', where, 'rate', 'cost', 'by', 'over', 'ordered', 'while_parked', unpack(FIELDS))
    local given, numbers = {}, {}
    for field = at + 3, at + 2 + size, 2 do
      given[ARGV[field]] = ARGV[field + 1]
    end
    for i = 1, #FIELDS do
      numbers[i] = given[FIELDS[i]] or '-'
    end
    redis.call('HSET', where, 'digest', digest, 'app', ARGV[2], 'at', text(started or NOW), 'numbers',
      table.concat(numbers, ' '), unpack(ARGV, at + 3, at + 2 + size))
  elseif later then
    redis.call('HSET', where, 'at', text(started))
  end
  local held = tonumber(redis.call('HGET', where, 'hold') or '') or 0
  redis.call('PEXPIRE', where, text(math.max(KEPT, held - NOW)))
  drop_expired(name, 100)
  keep(holders(name, '-'))
  redis.call('ZADD', TAG .. 'limits', 'GT', text(NOW), name)
  at = at + 3 + size
end
redis.call('ZREMRANGEBYSCORE', TAG .. 'limits', '-inf', text(NOW - KEPT))
keep(TAG .. 'limits')
return others
