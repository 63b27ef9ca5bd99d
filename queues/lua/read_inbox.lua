-- include: inbox
-- Read a page of the unread messages of an inbox.
-- KEYS  inbox
-- ARGV  position after which to read ('' for the first unread message), largest number of messages of an inbox, of a page,
--       bytes of a page, largest size of a message in bytes
-- returns  {position after which to read next ('' at the end), fields that no sender wrote, at least, then of each message
--          its number, and the message or, if it is too large, its size}
-- Writes nothing. A page has at least one message. Only messages that the inbox lists are read: what another program wrote
-- beside them is counted, and never sent. The fields of waits and values, see waits.py and values.py, are not counted.
local most, left = tonumber(ARGV[2]), tonumber(ARGV[4])
local used, sent = inbox_counts(KEYS[1], most)
local after = math.max(used, tonumber(ARGV[1]) or 0)
local expected = 2 * math.min(sent, most) + sent - used
for _, name in ipairs({'sent', 'used', 'last', 'bytes', 'given', 'open', 'early', 'values', 'changed', 'updates'}) do
  expected = expected + redis.call('HEXISTS', KEYS[1], name)
end
local foreign = math.max(0, redis.call('HLEN', KEYS[1]) - expected)
if foreign > 0 and foreign <= 10000 then
  for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    foreign = foreign - (string.find(name, '^[waecvo]:') and 1 or 0)
  end
end
local page = {'', math.max(0, foreign)}
while after < sent do
  local number = unread_number(KEYS[1], after + 1)
  if number then
    local size = redis.call('HSTRLEN', KEYS[1], 'm:' .. number)
    local sendable = size <= tonumber(ARGV[5])
    left = left - (sendable and size or 0)
    if #page > 2 and (left < 0 or #page >= 2 + 2 * tonumber(ARGV[3])) then
      page[1] = tostring(after)
      break
    end
    page[#page + 1] = number
    page[#page + 1] = sendable and redis.call('HGET', KEYS[1], 'm:' .. number) or size
  end
  after = after + 1
end
return page
