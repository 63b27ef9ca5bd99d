-- include: seen
-- Claim deliveries whose lease has expired, and released messages.
-- KEYS  ready stream, seen
-- ARGV  group, worker, lease in milliseconds, consumer of released messages, first entry to look at ('-', or '(ID' for
--       those after ID), largest number of deliveries, then own entries that this worker does not run
-- returns  {touch (see seen.lua), first entry to look at next ('' at the end), claimed: {entry, delivery count,
--          fields} of each, own entries whose lease has expired}
-- Atomic: two workers never claim the same delivery, and the count is that of this claim. The worker's own entries are
-- left out, except for those that it asks for: a worker that was stopped, or that Redis was away from, still runs them.
-- Claims nothing while leases are left to restart. Entries that were deleted by hand are acknowledged. Not to be repeated
-- after a lost reply: see Consumer.recover_own.
local touched, restarting = touch(KEYS[2], KEYS[1], ARGV[1], tonumber(ARGV[3]), ARGV[4])
local start, most = ARGV[5], tonumber(ARGV[6])
if restarting then
  return {touched, start, {}, {}}
end
local unknown = {}
for i = 7, #ARGV do
  unknown[ARGV[i]] = true
end
local claimed, own = {}, {}
while start ~= '' and #claimed < most do
  local page = redis.pcall('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], start, '+', most)
  if page.err then
    return page
  end
  local at = 0
  while at < #page and #claimed < most do
    at = at + 1
    local entry, count = page[at][1], page[at][4] + 1
    if page[at][2] == ARGV[2] and not unknown[entry] then
      own[#own + 1] = entry
    else
      local message = redis.call('XRANGE', KEYS[1], entry, entry)[1]
      if message then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'RETRYCOUNT', count, 'JUSTID')
        claimed[#claimed + 1] = {entry, count, message[2]}
      else
        redis.call('XACK', KEYS[1], ARGV[1], entry)
      end
    end
    start = '(' .. entry
  end
  if at == #page and #page < most then
    start = ''
  end
end
return {touched, start, claimed, own}
