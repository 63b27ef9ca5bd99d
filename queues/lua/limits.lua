-- The prelude of scripts on limits. KEYS[1] is the clock of the limits, from whose tag all their keys are made: which ones
-- a script needs follows from what it reads, and all are in one slot.
-- NOW, PRECISE: ms of Redis' clock, whole and with a fraction.
-- tick(step): set `virtual`, the time of the virtual clock in ms, by which tokens expire. It goes with Redis' clock, but by at
--   most `step` ms from one script to the next, half of a token's life, and never back. So a token whose renewals come each
--   third of its life outlives a time in which Redis was away, and a clock that was set; and since each script moves it on,
--   none outlives many scripts. The shortest step of the last ten minutes counts, since workers may differ in their leases.
--   Stored is "TIME VIRTUAL STEP END": the step that counts, and until when. A full server refuses that, and what follows,
--   unless the script has written before.
-- keep(key): let a key live for 30 days from now on, longer than anything renews it. It is also a write that a full server
--   accepts, and then the rest of the script.
-- find_limit(name): return the fields of its definition, as numbers, with what operators have set in its place ('-': no
--   such number); false if no worker has published it. Read once in a script. `numbers` has FIELDS in their order.
-- holders(name, key): return the key of the set of tokens. That of the limit (key '-') has members "KEY/MEMBER", that of a
--   key "MEMBER"; both have the same scores.
-- renew(name, key, member, expires): let a token of the limit's set expire later, never earlier. It is added to the set of
--   its key where another program has removed it there.
-- drop_expired(name, most): remove expired tokens, which count nowhere.
-- read_bucket(kind, name, key, interval, burst): read the time at which the rate or the costs of a key are paid for (`due`, see
--   take_limits.lua), within the bounds that it may have. save_bucket(bucket): store it.
local TAG = string.match(KEYS[1], '^.-}:')
local LOOK, LONGEST, KEPT = 15000, 60000, 2592000000
local time = redis.call('TIME')
local PRECISE = time[1] * 1000 + time[2] / 1000
local NOW = math.floor(PRECISE)

local function text(number)
  return string.format('%.0f', number)
end

local function keep(key)
  redis.call('PEXPIRE', key, KEPT)
end

local virtual
local function tick(step)
  local seen, before, least, ends = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%d+) (%d+) (%d+)$')
  local passed, shorter = NOW - tonumber(seen or NOW - 1000), step < tonumber(least or 0)
  virtual, least, ends = tonumber(before or NOW - 1000), tonumber(least or step), tonumber(ends or 0)
  if step <= least or NOW >= ends then
    least, ends = step, NOW + 600000
  end
  virtual = virtual + math.max(0, math.min(passed, least))
  if passed ~= 0 or shorter then
    redis.call('SET', KEYS[1], table.concat({text(NOW), text(virtual), text(least), text(ends)}, ' '), 'PX', KEPT)
  end
end

local function holders(name, key)
  return TAG .. 'holders:' .. name .. (key == '-' and '' or ':' .. key)
end

local function waiters(name, key)
  return TAG .. 'waiters:' .. name .. (key == '-' and '' or ':' .. key)
end

local function drop_expired(name, most)
  local expired = redis.call('ZRANGEBYSCORE', holders(name, '-'), '-inf', text(virtual), 'LIMIT', 0, most)
  for i = 1, #expired do
    local key, member = string.match(expired[i], '^([^/]*)/(.*)$')
    redis.call('ZREM', holders(name, '-'), expired[i])
    if key and key ~= '-' then
      redis.call('ZREM', holders(name, key), member)
    end
  end
end

local FIELDS = {'total', 'running', 'interval', 'burst', 'cost_interval', 'cost_burst', 'errors', 'calls', 'window', 'open'}
local found_limits = {}
local function find_limit(name)
  local found = found_limits[name]
  if found == nil then
    local defined = redis.call('HMGET', TAG .. 'limit:' .. name, 'numbers', 'hold', 'opened', 'probe')
    found = false
    if defined[1] then
      found = {hold = tonumber(defined[2]) or 0, opened = tonumber(defined[3]), probe = defined[4]}
      local i = 0
      for number in string.gmatch(defined[1], '%S+') do
        i = i + 1
        found[FIELDS[i]] = tonumber(number)
      end
      local where = TAG .. 'control:limit:' .. name
      if redis.call('EXISTS', where) == 1 then
        local set = redis.call('HMGET', where, 'hold', unpack(FIELDS))
        found.hold = math.max(found.hold, tonumber(set[1]) or 0)
        for i = 1, #FIELDS do
          if set[i + 1] then
            found[FIELDS[i]] = tonumber(set[i + 1])
          end
        end
      end
    end
    found_limits[name] = found
  end
  return found
end

local function renew(name, key, member, expires)
  redis.call('ZADD', holders(name, '-'), 'XX', 'GT', expires, key .. '/' .. member)
  keep(holders(name, '-'))
  if key ~= '-' then
    redis.call('ZADD', holders(name, key), 'GT', expires, member)
    keep(holders(name, key))
  end
end

local function read_bucket(kind, name, key, interval, burst)
  local where = TAG .. kind .. ':' .. name .. ':' .. key
  local due = tonumber(redis.call('GET', where) or '') or PRECISE
  return {key = where, due = math.max(PRECISE, math.min(due, PRECISE + burst * interval)), interval = interval,
    burst = burst}
end

local function save_bucket(bucket)
  local left = math.ceil(bucket.due - PRECISE)
  if left > 0 then
    redis.call('SET', bucket.key, string.format('%.4f', bucket.due), 'PX', text(left))
  else
    redis.call('DEL', bucket.key)
  end
end
