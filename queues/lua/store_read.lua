-- include: store
-- Read entries of a namespace of the key-value store.
-- KEYS  entries, newest token of each task, tasks by the time of their last access
-- ARGV  task ('' outside of a task), ms and sequence number of its entry, delivery count, then the keys
-- returns  {'read', packed entry or false of each key}, {'fenced', newer token}
-- Atomic: all entries are of one moment. Outside of a task it writes nothing; within one it keeps the token, see store.lua.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
local held = newer(KEYS[2], 1)
if held then
  return {'fenced', held}
end
local reply = {'read'}
for i = 5, #ARGV do
  local packed = redis.call('HGET', KEYS[1], 'e:' .. ARGV[i])
  reply[i - 3] = alive(packed) and packed or false
end
note(KEYS[2], KEYS[3], 1)
return reply
