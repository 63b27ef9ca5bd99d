-- Move a value that another program has put under a key to the junk of its partition: one of another type, or a hash.
-- KEYS  key, key that takes the value, junk
-- ARGV  type that the key has, most entries of the junk, milliseconds that junk is kept, then, for a hash of the right type:
--       a field, and its value as the caller has read it ('' for none)
-- returns  the type of the value that was moved now, '' if there was none
-- Atomic: the check and the move are one act, so a value that was stored meanwhile stays. Idempotent: a repeated call
-- finds another value, or none. Nothing here needs memory before the move is done: a full server accepts it, and the list
-- of junk, which is for people, may lack the entry. A value that was moved before makes room.
local found = redis.call('TYPE', KEYS[1])
found = type(found) == 'table' and found.ok or found
local right = found == ARGV[1]
if right and ARGV[4] then
  right = (redis.call('HGET', KEYS[1], ARGV[4]) or '') ~= ARGV[5]
end
if found == 'none' or right then
  return ''
end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.pcall('XADD', KEYS[3], 'MAXLEN', ARGV[2], '*', 'key', KEYS[1], 'item', KEYS[2],
  'content', 'a value of type ' .. found .. ', kept under the key in item', 'bytes', 0)
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return found
