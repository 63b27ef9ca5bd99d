-- include: store
-- Read a page of the entries of a namespace of the key-value store, sorted by the bytes of their keys.
-- KEYS  entries, sorted keys, newest token of each task, tasks by the time of their last access
-- ARGV  task ('' outside of a task), ms and sequence number of its entry, delivery count, first key and last key (as of
--       ZRANGEBYLEX), '1' for the last key first, most keys to look at, bytes of values after which the page ends, '1' with
--       the data of values
-- returns  {'read', key to continue after ('' at the end), key, packed entry, ...}, {'fenced', newer token}
-- Atomic: a page is of one moment. Outside of a task it writes nothing; within one it keeps the token, see store.lua.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[4], '')
local held = newer(KEYS[3], 1)
if held then
  return {'fenced', held}
end
local keys
if ARGV[7] == '1' then
  keys = redis.call('ZREVRANGEBYLEX', KEYS[2], ARGV[6], ARGV[5], 'LIMIT', 0, ARGV[8])
else
  keys = redis.call('ZRANGEBYLEX', KEYS[2], ARGV[5], ARGV[6], 'LIMIT', 0, ARGV[8])
end
local reply, size, last = {'read', ''}, 0, 0
for i, key in ipairs(keys) do
  local packed = redis.call('HGET', KEYS[1], 'e:' .. key)
  if alive(packed) then
    if ARGV[10] ~= '1' then
      packed = string.match(packed, '^%d+ %d+ %a ')
    end
    reply[#reply + 1], reply[#reply + 2] = key, packed
    size = size + #packed
  end
  last = i
  if size >= tonumber(ARGV[9]) then
    break
  end
end
if last < #keys or #keys == tonumber(ARGV[8]) then
  reply[2] = keys[last]
end
note(KEYS[3], KEYS[4], 1)
return reply
