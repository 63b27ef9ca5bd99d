-- Replace a stream whose ids have run ahead of the clock, so that entries get ids of the present time again.
-- KEYS  stream
-- ARGV  group ('' for the dead-letter stream), milliseconds that an id may be ahead of the clock of Redis, largest number of
--       bytes that are kept
-- returns  -1 the stream need not be replaced; else the number of entries that were not kept
-- Atomic: the new stream has the entries, group, consumers and pending list of the old one, so that leases and delivery
-- counts stay. Entries that are ahead of the clock are not kept, nor what exceeds the limit: the script blocks the server.
-- The tasks of these messages are put back from their records (put_back.lua). This script alone uses a key that it has
-- deleted (see fence.lua): the last id of a stream never becomes smaller. While the slot migrates, the script may end
-- there, and all tasks of the stream are put back.
-- The dead-letter stream is replaced only once no id is left in it, and keeps every letter: no record has its payload. A
-- letter that has the last id gets another one.
local LAST_ID = '18446744073709551615-18446744073709551615'
local letters = ARGV[1] == ''
local time = redis.call('TIME')
local bound = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
local function is_ahead(id)
  return tonumber(string.match(id, '^%d+')) > bound
end

local function named(flat)
  local found = {}
  for at = 1, #flat, 2 do
    found[flat[at]] = flat[at + 1]
  end
  return found
end

local info = named(redis.pcall('XINFO', 'STREAM', KEYS[1]))
if not info['last-generated-id'] or not is_ahead(info['last-generated-id'])
  or (letters and info['last-generated-id'] ~= LAST_ID) then
  return -1
end
local delivered
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local found = named(group)
  delivered = found['name'] == ARGV[1] and found['last-delivered-id'] or delivered
end
local function is_kept(message)
  for i = 1, letters and is_ahead(message[1]) and #message[2] or 0, 2 do
    if message[2][i] == 'evidence' then
      return true
    end
  end
  return not is_ahead(message[1])
end

local kept, start, last, left = {}, '-', '0-0', letters and math.huge or tonumber(ARGV[3])
local to = letters and '+' or string.format('%.0f', bound)
while start and left > 0 do
  local page = redis.call('XRANGE', KEYS[1], start, to, 'COUNT', 50)
  for _, message in ipairs(page) do
    for _, part in ipairs(message[2]) do
      left = left - #part
    end
    if #message[2] < 4000 and is_kept(message) then -- Lua cannot pass more than some thousand values to one command
      kept[#kept + 1] = message
      last = message[1]
    end
  end
  start = page[50] and '(' .. page[50][1]
end
local consumers = delivered and redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1]) or {}
local pending = delivered and redis.call('XPENDING', KEYS[1], ARGV[1], '-', last, 10000) or {}
redis.call('DEL', KEYS[1])
for _, message in ipairs(kept) do
  redis.call('XADD', KEYS[1], message[1] == LAST_ID and '*' or message[1], unpack(message[2]))
end
-- The ids that follow are of the present time: greater than those that a group has read.
redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'why', 'replaced'))
if delivered then
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], is_ahead(delivered) and last or delivered)
end
for _, consumer in ipairs(consumers) do
  redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], named(consumer)['name'])
end
for _, delivery in ipairs(pending) do
  local id, owner, idle, count = unpack(delivery)
  if #redis.call('XRANGE', KEYS[1], id, id) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], owner, 0, id, 'IDLE', idle, 'RETRYCOUNT', count, 'FORCE', 'JUSTID')
  end
end
return info['length'] - #kept
