-- include: limits
-- Take tokens of limits: for each request all of its uses or none, in order.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  largest step of the virtual clock in ms, life of a token in ms, then of each request: member, '1' if rate and cost
--       are charged, waiter ('' for none), number of uses, and of each use: limit, key ('-' for none), cost, encrypted text
--       of the key ('' to leave it as it is)
-- returns  {answers, half-open breakers}. Each answer: 1: taken; 2: the member has held all of them; else {position of the
--          use (from 0), reason, ms after which to look again}, and nothing of the request is taken or charged.
--          Reasons: running, total, rate, cost, hold, open, unknown
-- Atomic: within one request all or none, and no two requests count the same free place. A set that seems full is counted
-- again without what has expired, so no place is given away while the token that had it is still there.
-- Idempotent by member: what a member holds already is renewed, and neither counted nor charged again, so a reply that was
-- lost, a mover that confirms, and a message that is delivered again find their token. If the caller dies, the token
-- expires. Bytes that arrive after the release take a token that no worker renews: it expires as well, and until then
-- only lets fewer tasks run.
-- A request that is blocked leaves its waiter where the release of what blocked it looks, in the act that found it full:
-- so no release comes between. Whatever else unblocks it (time, an operator, an expiry) is found by looking again: of a
-- full set after the first expiry, of anything that an operator may change after 15 s at the latest.
-- Rate and cost: the generic cell rate algorithm (ITU-T I.371, the virtual scheduling form). Stored is the time at which all
-- that passed is paid for; one that costs n passes if that time, n intervals later, is at most `burst` intervals away. A
-- time that is further away (a clock set back, a burst that was lowered) is cut to that. A cost over the burst counts as the
-- burst, since an operator may lower it: it would wait for ever.
-- A breaker that was opened lets one token pass after its time, the probe; another one if that has expired.
tick(tonumber(ARGV[1]))
local life = tonumber(ARGV[2])
local expires, fresh = text(virtual + life), virtual + life * 2 / 3
local answers, probes, waits, places = {}, {}, {}, {}
local counted, purged, buckets, full = {}, {}, {}, {}

-- Return whether a set has as many tokens as it may. What has expired is removed before it is full.
local function is_full(name, key, most)
  local where = holders(name, key)
  counted[where] = counted[where] or redis.call('ZCARD', where)
  if counted[where] >= most and not purged[where] then
    purged[where] = true
    drop_expired(name, 100)
    redis.call('ZREMRANGEBYSCORE', where, '-inf', text(virtual))
    counted = {[where] = redis.call('ZCARD', where)}
  end
  return counted[where] >= most
end

local function add(where, member)
  redis.call('ZADD', where, expires, member)
  if counted[where] ~= nil then
    counted[where] = counted[where] + 1
  end
  if (counted[where] or 1) == 1 or NOW % 64 == 0 then
    keep(where)
  end
end

local function get_bucket(kind, name, key, interval, burst)
  local where = kind .. name .. ':' .. key
  buckets[where] = buckets[where] or read_bucket(kind, name, key, interval, burst)
  return buckets[where]
end

-- Return ms until the first token of a full set expires; read once.
local function wait_for(name, where)
  if not full[where] then
    local first = redis.call('ZRANGEBYSCORE', where, '(' .. text(virtual), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    full[where] = first[2] and first[2] - virtual or 1
  end
  return full[where]
end

-- Return why one use is blocked, ms until it is not, and the set where its waiter belongs; nil if it is not.
local function blocked(name, key, cost, charged)
  local limit = find_limit(name)
  if not limit then
    return 'unknown', LOOK
  elseif limit.hold > NOW then
    return 'hold', limit.hold - NOW, waiters(name, '-')
  end
  if limit.errors and limit.opened then
    local left = math.min(limit.opened - NOW, limit.open)
    local probe = left <= 0 and limit.probe and redis.call('ZSCORE', holders(name, '-'), limit.probe)
    if probe and tonumber(probe) > virtual then
      left = probe - virtual
    end
    if left > 0 then
      return 'open', left, waiters(name, '-')
    end
  end
  local all, own = holders(name, '-'), holders(name, key)
  if limit.running and key ~= '-' and is_full(name, key, limit.running) then
    return 'running', wait_for(name, own), waiters(name, key)
  elseif limit.total and is_full(name, '-', limit.total) then
    return 'total', wait_for(name, all), waiters(name, '-')
  elseif not charged then
    return nil
  end
  if limit.interval and limit.burst then
    local rate = get_bucket('rate', name, key, limit.interval, limit.burst)
    local left = rate.due + rate.interval - rate.burst * rate.interval - PRECISE
    if left > 0.001 then
      return 'rate', left
    end
  end
  if limit.cost_interval and limit.cost_burst then
    local paid = get_bucket('cost', name, key, limit.cost_interval, limit.cost_burst)
    local left = paid.due + (math.min(cost, paid.burst) - paid.burst) * paid.interval - PRECISE
    if left > 0.001 then
      return 'cost', left
    end
  end
end

local function take(name, key, cost, label, member, charged)
  local limit, all, own = find_limit(name), holders(name, '-'), holders(name, key)
  local entry = key .. '/' .. member
  add(all, entry)
  if key ~= '-' then
    add(own, member)
  end
  if charged and limit.interval and limit.burst then
    local rate = get_bucket('rate', name, key, limit.interval, limit.burst)
    rate.due = rate.due + rate.interval
    save_bucket(rate)
  end
  if charged and limit.cost_interval and limit.cost_burst and cost > 0 then
    local paid = get_bucket('cost', name, key, limit.cost_interval, limit.cost_burst)
    paid.due = paid.due + math.min(cost, paid.burst) * paid.interval
    save_bucket(paid)
  end
  if label ~= '' then
    redis.call('SET', TAG .. 'label:' .. name .. ':' .. key, label, 'PX', 86400000)
  end
  if limit.errors and limit.opened then
    limit.probe = entry
    redis.call('HSET', TAG .. 'limit:' .. name, 'probe', entry)
    probes[#probes + 1] = name
  end
end

local at = 3
while at <= #ARGV do
  local member, charged, waiter, uses = ARGV[at], ARGV[at + 1] == '1', ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  local missing, answer = {}, 2
  for use = 0, uses - 1 do
    local name, key = ARGV[at + use * 4], ARGV[at + use * 4 + 1]
    local entry = key .. '/' .. member
    local held = tonumber(redis.call('ZSCORE', holders(name, '-'), entry) or '')
    if not held or held <= virtual then
      missing[#missing + 1] = use
    elseif held < fresh then
      renew(name, key, member, expires)
    end
  end
  for i = 1, #missing do
    local first = at + missing[i] * 4
    local reason, left, place = blocked(ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2]), charged)
    if reason then
      local most = (reason == 'running' or reason == 'total') and LONGEST or LOOK
      answer = {missing[i], reason, math.max(1, math.min(math.ceil(left), most))}
      if place and waiter ~= '' then
        if not waits[place] then
          waits[place] = {}
          places[#places + 1] = place
        end
        table.insert(waits[place], waiter)
      end
      break
    end
  end
  if answer == 2 and #missing > 0 then
    answer = 1
    for i = 1, #missing do
      local first = at + missing[i] * 4
      take(ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2]), ARGV[first + 3], member, charged)
    end
  end
  answers[#answers + 1] = answer
  at = at + uses * 4
end
for i = 1, #places do
  local listed = waits[places[i]]
  for j = 1, #listed do
    redis.call('ZADD', places[i], 'NX', string.format('%.3f', virtual + j / 1000), listed[j])
  end
  redis.call('PEXPIRE', places[i], 3600000)
end
return {answers, probes}
