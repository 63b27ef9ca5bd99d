-- Replace the watchers of a task that has not ended.
-- KEYS  record
-- ARGV  watchers as the caller has read them ('' for none), the new ones
-- returns  'missing'; 'watched'; 'changed': the record has other watchers by now; the state of a task that has ended
-- Atomic: a task that ends after this puts a notice for its watchers into the outbox, in the act that ends it.
local known = redis.call('HMGET', KEYS[1], 'state', 'watchers')
if not known[1] then
  return 'missing'
elseif known[1] == 'succeeded' or known[1] == 'cancelled' or known[1] == 'dead' then
  return known[1]
elseif (known[2] or '') ~= ARGV[1] then
  return 'changed'
end
redis.call('HSET', KEYS[1], 'watchers', ARGV[2])
return 'watched'
