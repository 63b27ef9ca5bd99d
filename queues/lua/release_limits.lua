-- include: limits
-- Release tokens of limits, correct what they have cost, and let breakers count how their tasks have ended.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  of each request: member, 'ok', 'error' or '' (nothing is counted), number of uses, and of each use: limit, key ('-'
--       for none), cost that was reserved, actual cost ('' for the same). A request of member '' releases nothing: it
--       offers what is free to the next waiters
-- returns  {waiters that may look now, positions (from 0) of requests whose member held nothing, changes of breakers: flat
--          limit, 'open' or 'closed', ms until which it is open, calls and errors that were counted, number of waiters that
--          were published}
-- Atomic: a token is removed, its cost is corrected and its outcome is counted, all or none. Idempotent: only what is
-- removed has an effect. So bytes that arrive twice or late, the release of a run that had lost its token, and one that
-- follows an expiry by an operator's release do nothing. If the caller dies before, the token expires; if it dies after, or
-- the reply is lost, the hints are lost: who waits looks again by itself. A full server accepts it, since
-- it removes before it writes.
-- As many waiters are popped as places are free now, the first of the key and the first of the limit. A waiter that starts
-- with 'memory/' is published on the channel of the limit's waiters in place of being returned. Its process may have died,
-- so the caller offers the place a little later.
-- A waiter that was popped and leaves its place free (it was cancelled, or another limit blocks it) makes its caller offer the
-- place again. Such bytes that arrive late pop waiters that nothing wakes: these look again by themselves as well.
-- A correction is not larger than the burst in effect, for what is due is never further away than that (see
-- take_limits.lua), and what was paid for is not paid back twice.
-- The window of a breaker is counted in two halves, `slot` is the number of the later one: c1 calls and e1 errors, and before
-- it c0 and e0. While it is open, only the outcome of the probe counts.
local hints, gone, changes = {}, {}, {}
local freed, places, counts = {}, {}, {}

local function free(place, channel, more)
  if not freed[place] then
    freed[place] = {0, channel}
    places[#places + 1] = place
  end
  freed[place][1] = freed[place][1] + more
end

local breaking = {}
local function may_break(name)
  if breaking[name] == nil then
    breaking[name] = redis.call('HEXISTS', TAG .. 'limit:' .. name, 'errors') == 1
      or redis.call('EXISTS', TAG .. 'control:limit:' .. name) == 1
  end
  return breaking[name]
end

local function correct(name, key, limit, reserved, actual)
  if limit.cost_interval and limit.cost_burst then
    local paid = read_bucket('cost', name, key, limit.cost_interval, limit.cost_burst)
    paid.due = paid.due + (actual - math.min(reserved, paid.burst)) * paid.interval
    save_bucket(paid)
  end
end

local function change(name, state, ends, calls, failed)
  for _, value in ipairs({name, state, text(ends), text(calls), text(failed)}) do
    changes[#changes + 1] = value
  end
end

local function open_breaker(name, limit, calls, failed)
  limit.opened, limit.probe = NOW + limit.open, false
  redis.call('HSET', TAG .. 'limit:' .. name, 'opened', text(limit.opened))
  redis.call('HDEL', TAG .. 'limit:' .. name, 'probe', 'slot', 'c0', 'e0', 'c1', 'e1')
  counts[name] = nil
  change(name, 'open', limit.opened, calls, failed)
end

local function count_outcome(name, entry, limit, outcome)
  local where = TAG .. 'limit:' .. name
  if limit.opened then
    if limit.probe ~= entry then
      return
    elseif outcome == 'error' then
      open_breaker(name, limit, 1, 1)
    else
      limit.probe = false
      redis.call('HDEL', where, 'probe')
      if outcome == 'ok' then
        limit.opened = nil
        redis.call('HDEL', where, 'opened')
        change(name, 'closed', 0, 1, 0)
        free(waiters(name, '-'), name, 15)
      end
    end
    return
  elseif outcome == '' then
    return
  end
  local slot = math.floor(NOW / math.max(1, limit.window / 2))
  local known = counts[name]
  if not known then
    known = redis.call('HMGET', where, 'slot', 'c0', 'e0', 'c1', 'e1')
    for i = 1, 5 do
      known[i] = tonumber(known[i] or '') or 0
    end
    if known[1] ~= slot then
      local later = known[1] == slot - 1
      known = {slot, later and known[4] or 0, later and known[5] or 0, 0, 0}
    end
    counts[name] = known
  end
  known[4] = known[4] + 1
  known[5] = known[5] + (outcome == 'error' and 1 or 0)
  local calls, failed = known[2] + known[4], known[3] + known[5]
  if calls >= limit.calls and failed >= limit.errors * calls then
    open_breaker(name, limit, calls, failed)
  end
end

local function offer(name, key)
  local limit = find_limit(name)
  if limit and limit.hold <= NOW and not (limit.errors and limit.opened) then
    local room = limit.total and limit.total - redis.call('ZCARD', holders(name, '-')) or 1
    if room > 0 then
      free(waiters(name, '-'), name, room)
      room = limit.running and math.min(room, limit.running - redis.call('ZCARD', holders(name, key))) or room
      if key ~= '-' and room > 0 then
        free(waiters(name, key), name, room)
      end
    end
  end
end

local at, position = 1, 0
while at <= #ARGV do
  local member, outcome, uses = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  at = at + 3
  local removed = 0
  for first = at, at + uses * 4 - 1, 4 do
    local name, key, actual = ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 3])
    local entry = key .. '/' .. member
    if member == '' then
      offer(name, key)
    elseif redis.call('ZREM', holders(name, '-'), entry) == 1 then
      removed = removed + 1
      free(waiters(name, '-'), name, 1)
      if key ~= '-' then
        redis.call('ZREM', holders(name, key), member)
        free(waiters(name, key), name, 1)
      end
      local limit = (actual or may_break(name)) and find_limit(name)
      if limit and actual then
        correct(name, key, limit, tonumber(ARGV[first + 2]), actual)
      end
      if limit and limit.errors then
        count_outcome(name, entry, limit, outcome)
      end
    end
  end
  if removed == 0 then
    gone[#gone + 1] = position
  end
  position = position + 1
  at = at + uses * 4
end
for name, known in pairs(counts) do
  redis.call('HSET', TAG .. 'limit:' .. name, 'slot', text(known[1]), 'c0', known[2], 'e0', known[3], 'c1', known[4],
    'e1', known[5])
end
local published = 0
for i = 1, #places do
  local most, name = unpack(freed[places[i]])
  local popped = redis.call('ZPOPMIN', places[i], most)
  for j = 1, #popped, 2 do
    if string.sub(popped[j], 1, 7) == 'memory/' then
      redis.call('PUBLISH', waiters(name, '-'), popped[j])
      published = published + 1
    else
      hints[#hints + 1] = popped[j]
    end
  end
end
return {hints, gone, changes, published}
