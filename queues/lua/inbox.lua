-- The prelude of scripts that use an inbox: any client may write into it, so what is no number counts as none, and no loop
-- is longer than an inbox that was filled by senders.
-- LARGEST_COUNT: the largest number of 14 digits; Lua writes no longer one exactly. No script stores its successor.
-- inbox_number(value): a number of at most 14 digits; 0 for anything else.
-- inbox_counts(inbox, most): how many of the first messages were all used, and how many were sent; at most `most` apart.
-- unread_number(inbox, position): the number of the message at a position if it is unread, else false.
-- first_unread(inbox, used, sent): the position before the first unread message.
local LARGEST_COUNT = 99999999999999

local function inbox_number(value)
  return value and #value <= 14 and string.match(value, '^%d+$') and tonumber(value) or 0
end

local function inbox_counts(inbox, most)
  local counts = redis.call('HMGET', inbox, 'used', 'sent')
  local used, sent = inbox_number(counts[1]), inbox_number(counts[2])
  return math.max(math.min(used, sent), sent - most), sent
end

local function unread_number(inbox, position)
  local number = string.match(redis.call('HGET', inbox, 'n:' .. position) or '', '^%d+')
  return number and #number <= 14 and redis.call('HEXISTS', inbox, 'm:' .. number) == 1 and number
end

local function first_unread(inbox, used, sent)
  while used < sent and not unread_number(inbox, used + 1) do
    used = used + 1
  end
  return used
end
