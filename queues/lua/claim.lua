-- include: seen
-- Claim deliveries whose lease has expired, and released messages.
-- KEYS  ready stream, seen
-- ARGV  group, worker, lease in milliseconds, consumer of released messages, first entry to look at ('-', an id, or '(ID'
--       for those after ID), largest number of deliveries, then own entries that this worker does not run
-- returns  {touch (see seen.lua), first entry to look at next ('' at the end), claimed: {entry, delivery count,
--          fields} of each, own entries whose lease has expired}
-- Atomic: two workers never claim the same delivery, and the count is that of this claim. The worker's own entries are
-- left out, except for those that it asks for: a worker that was stopped, or that Redis was away from, still runs them.
-- A worker without entries of its own claims with XAUTOCLAIM, which would take those as well. JUSTID would keep the
-- delivery count, and so hand out a fence twice.
-- Claims nothing while leases are left to restart. Entries that were deleted by hand are acknowledged. Not to be repeated
-- after a lost reply: see Consumer.recover_own.
local group, worker, lease = ARGV[1], ARGV[2], ARGV[3]
local touched, restarting = touch(KEYS[2], KEYS[1], group, tonumber(lease), ARGV[4])
local start, most = ARGV[5], tonumber(ARGV[6])
if restarting then
  return {touched, start, {}, {}}
end
local first = redis.pcall('XPENDING', KEYS[1], group, 'IDLE', lease, start, '+', 1)
if first.err then
  return first
elseif not first[1] then
  return {touched, '', {}, {}}
end
local claimed, own = {}, {}
if not redis.call('XPENDING', KEYS[1], group, '-', '+', 1, worker)[1] then
  local messages, taken = {}, 0
  while first[1] and taken < most do
    local page = redis.call('XAUTOCLAIM', KEYS[1], group, worker, lease, first[1][1], 'COUNT', most - taken)
    start, taken = page[1], taken + #page[2]
    for i = 1, #page[2] do
      local message = page[2][i] -- false: Redis 6.2 claims deleted entries, later versions acknowledge them
      if message then
        messages[message[1]] = message[2]
      end
    end
    first = start ~= '0-0' and redis.call('XPENDING', KEYS[1], group, 'IDLE', lease, start, '+', 1) or {}
  end
  local pending = taken > 0 and redis.call('XPENDING', KEYS[1], group, '-', '+', taken, worker) or {}
  for i = 1, #pending do
    local entry, count = pending[i][1], pending[i][4]
    if messages[entry] then
      claimed[#claimed + 1] = {entry, count, messages[entry]}
    else
      redis.call('XACK', KEYS[1], group, entry)
    end
  end
  return {touched, first[1] and first[1][1] or '', claimed, own}
end
local unknown = {}
for i = 7, #ARGV do
  unknown[ARGV[i]] = true
end
while start ~= '' and #claimed < most do
  local page = redis.call('XPENDING', KEYS[1], group, 'IDLE', lease, start, '+', most)
  local at = 0
  while at < #page and #claimed < most do
    at = at + 1
    local entry, count = page[at][1], page[at][4] + 1
    if page[at][2] == worker and not unknown[entry] then
      own[#own + 1] = entry
    else
      local message = redis.call('XRANGE', KEYS[1], entry, entry)[1]
      if message then
        redis.call('XCLAIM', KEYS[1], group, worker, 0, entry, 'RETRYCOUNT', count, 'JUSTID')
        claimed[#claimed + 1] = {entry, count, message[2]}
      else
        redis.call('XACK', KEYS[1], group, entry)
      end
    end
    start = '(' .. entry
  end
  if at == #page and #page < most then
    start = ''
  end
end
return {touched, start, claimed, own}
