-- Move what another program wrote into a key to the junk of its partition.
-- KEYS  sorted set, hash or stream; junk
-- ARGV  'zset', 'hash' or 'stream', most entries of the junk, milliseconds that it is kept, most bytes that an entry keeps
--       of an item, then the items: members, fields or entry ids
-- returns  the number of items that were moved now
-- Atomic per item: it is in the key or in the junk. Idempotent: an item that is gone is left alone. The item leaves its key
-- first: a full server then accepts the rest (see fence.lua).
local moved = 0
for i = 5, #ARGV do
  local content, gone = '', 0
  if ARGV[1] == 'zset' then
    gone = redis.call('ZREM', KEYS[1], ARGV[i])
  elseif ARGV[1] == 'hash' then
    content = redis.call('HGET', KEYS[1], ARGV[i]) or ''
    gone = redis.call('HDEL', KEYS[1], ARGV[i])
  else
    local found = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])
    content = found[1] and table.concat(found[1][2], ' ') or ''
    gone = redis.call('XDEL', KEYS[1], ARGV[i])
  end
  if gone == 1 then
    local item, most = ARGV[i], tonumber(ARGV[4])
    redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[2], '*', 'key', KEYS[1], 'item', string.sub(item, 1, most),
      'content', string.sub(content, 1, most), 'bytes', #item + #content)
    moved = moved + 1
  end
end
if moved > 0 then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
return moved
