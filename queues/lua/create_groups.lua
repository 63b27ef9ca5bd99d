-- Create the consumer groups of a partition, and the streams, unless they exist.
-- KEYS  ready stream, nudge stream
-- ARGV  group
-- returns  the number of groups that were created
-- Atomic only in that a full server accepts all of it: the first write changes nothing, and after it the server accepts
-- the rest (see fence.lua). Without a group, no worker could drain the server. Idempotent. A group begins at id 0, so
-- that it misses no message.
local created = 0

local function create(stream)
  local reply = redis.pcall('XGROUP', 'CREATE', stream, ARGV[1], '0', 'MKSTREAM')
  if not reply.err then
    created = created + 1
  elseif not string.find(tostring(reply.err), 'BUSYGROUP', 1, true) then
    return reply
  end
end

redis.call('XACK', KEYS[1], ARGV[1], '0-0')
return create(KEYS[1]) or create(KEYS[2]) or created
