-- include: store
-- Execute a batch of changes of a namespace of the key-value store, if all of its conditions hold.
-- KEYS  entries, sorted keys, keys by their expiry, newest token of each task, tasks by their last access, ids of batches
-- ARGV  task ('' outside of a task), ms and sequence number of its entry, delivery count, id of the batch, id of the act of
--       a step ('' for none) that may make other changes when it is repeated, ms for which the namespace knows both, most
--       ids that it knows, most entries, then of each change: `put`, `delete`, `check` or `prefix`; the key, or the prefix
--       of the keys to delete; the version that the key must have ('' for any, 0 for none); ms after which the entry
--       expires (0 for never); its form and its data; the id of the upload with its chunks ('' for none)
-- returns  {'stored', version, '1' if the namespace was empty}, {'conflict', key, version that is there},
--          {'full', number of entries}, {'upload', id of an upload that has expired}, {'fenced', newer token}
-- Atomic: all conditions are of one moment, and all changes or none are done. Idempotent: the namespace knows the ids of its
-- last batches; one that it knows is not executed again, also if the entries have changed since. A step that was cut off
-- and makes other changes now meets its own versions, which count as the expected ones. Fenced: see store.lua.
-- Versions follow the clock, so that none is used again after an entry was deleted or has expired. All puts come before the
-- first removal: no command names a key whose last member is removed, which a migrating slot of a cluster would refuse.
-- a key of another type ends the script here, before its first write
redis.call('HEXISTS', KEYS[4], '')
redis.call('ZSCORE', KEYS[5], '')
local count, timed = redis.call('ZCARD', KEYS[2]), redis.call('ZCARD', KEYS[3])
local empty, former = count == 0, tonumber(redis.call('HGET', KEYS[1], 'version') or 0) or 0
local done = redis.call('ZSCORE', KEYS[6], ARGV[5])
local own = ARGV[6] ~= '' and redis.call('ZSCORE', KEYS[6], ARGV[6])
own = own and text(tonumber(own))
local held = newer(KEYS[4], 1)
if held then
  return {'fenced', held}
elseif done then
  note(KEYS[4], KEYS[5], 1)
  return {'stored', text(tonumber(done)), '1'}
end
local root = string.sub(KEYS[1], 1, -8)

local packed = {}
local function read(key)
  if packed[key] == nil then
    packed[key] = redis.call('HGET', KEYS[1], 'e:' .. key)
  end
  return packed[key]
end

for i = 10, #ARGV, 7 do
  if ARGV[i + 2] ~= '' then
    local found = read(ARGV[i + 1])
    local version = alive(found) and string.match(found, '^%d+') or '0'
    if version ~= ARGV[i + 2] and version ~= own then
      note(KEYS[4], KEYS[5], 1)
      return {'conflict', ARGV[i + 1], version}
    end
  end
  if ARGV[i + 6] ~= '' and redis.call('EXISTS', root .. 'upload:' .. ARGV[i + 6]) == 0 then
    return {'upload', ARGV[i + 6]}
  end
end

-- what each changed key has in the end: the index of its put, or false
local final, order = {}, {}
local function set(key, at)
  if final[key] == nil then
    order[#order + 1] = key
  end
  final[key] = at
end
for i = 10, #ARGV, 7 do
  local act, key = ARGV[i], ARGV[i + 1]
  if act == 'put' then
    set(key, i)
  elseif act == 'delete' then
    set(key, false)
  elseif act == 'prefix' then
    local last = key == '' and '+' or '(' .. key .. '\255'
    for _, name in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. key, last)) do
      set(name, false)
    end
    for _, name in ipairs(order) do
      if string.sub(name, 1, #key) == key then
        final[name] = false
      end
    end
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', text(now), 'LIMIT', 0, 100)) do
  if final[name] == nil then
    set(name, false)
  end
end

local after, puts = count, false
for _, key in ipairs(order) do
  local exists = read(key) ~= false
  if final[key] then
    puts = true
    after = after + (exists and 0 or 1)
  elseif exists then
    after = after - 1
  end
end
if puts and after > count and after > tonumber(ARGV[9]) then
  note(KEYS[4], KEYS[5], 1)
  return {'full', text(count)}
end

local version = text(math.max(now, former + 1))
local values = {}
if puts then
  redis.call('HSET', KEYS[1], 'version', version)
end
for _, key in ipairs(order) do
  local found = read(key)
  local large = found and string.match(found, '^%d+ %d+ %u (%S+) ')
  if large then
    values[#values + 1] = root .. 'value:' .. large
  end
  local at = final[key]
  if at then
    local ttl, upload = tonumber(ARGV[at + 3]), ARGV[at + 6]
    local expires = ttl > 0 and text(now + ttl) or '0'
    redis.call('HSET', KEYS[1], 'e:' .. key,
      version .. ' ' .. expires .. ' ' .. ARGV[at + 4] .. ' ' .. ARGV[at + 5])
    count = count + redis.call('ZADD', KEYS[2], 0, key)
    if ttl > 0 then
      timed = timed + redis.call('ZADD', KEYS[3], expires, key)
    end
    if upload ~= '' then
      local value = root .. 'value:' .. upload
      redis.call('RENAME', root .. 'upload:' .. upload, value)
      if ttl > 0 then
        redis.call('PEXPIRE', value, ARGV[at + 3])
      else
        redis.call('PERSIST', value)
      end
    end
  end
end
for _, key in ipairs(order) do
  local at, found = final[key], read(key)
  if found and timed > 0 and not (at and tonumber(ARGV[at + 3]) > 0) then
    timed = timed - redis.call('ZREM', KEYS[3], key)
  end
end
for _, key in ipairs(order) do
  if not final[key] and read(key) then
    redis.call('HDEL', KEYS[1], 'e:' .. key)
    count = count - redis.call('ZREM', KEYS[2], key)
  end
end
for i = 1, #values, 1000 do
  redis.call('DEL', unpack(values, i, math.min(i + 999, #values)))
end

-- A namespace without entries keeps its last version for a while; one whose entries all expire goes with the last one
if count == 0 then
  redis.call('PEXPIRE', KEYS[1], KEPT)
else
  local last = timed == count and text(redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2] - now)
  for i = 1, 3 do
    if last then
      redis.call('PEXPIRE', KEYS[i], last)
    elseif i < 3 or timed > 0 then
      redis.call('PERSIST', KEYS[i])
    end
  end
end
redis.call('ZADD', KEYS[6], version, ARGV[5])
if ARGV[6] ~= '' then
  redis.call('ZADD', KEYS[6], version, ARGV[6])
end
redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', '(' .. text(now - ARGV[7]))
redis.call('ZREMRANGEBYRANK', KEYS[6], 0, -1 - tonumber(ARGV[8]))
redis.call('PEXPIRE', KEYS[6], ARGV[7])
note(KEYS[4], KEYS[5], 1)
return {'stored', version, empty and '1' or ''}
