-- Write or remove a file of a shared workspace, if it has the version that the caller expects.
-- KEYS  files of the workspace, index of the workspaces
-- ARGV  path, expected version ('' for any, 0 for none), id of this write ('' for none), most files, milliseconds for
--       which the workspace is kept, workspace, the file ('' removes it)
-- returns  {'stored', version}, {'removed', 0}, {'conflict', version, file that is there}, {'full', number of files}
-- Atomic: of two writers that expect one version, one gets a conflict. Idempotent: the workspace knows the ids of its last
-- 100 changes, and repeats none of them, also if another writer has changed the file since. Versions follow the clock, so
-- that none is used again after the workspace has expired: the first one tells a workspace from an expired one.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[2], '')
local done = ARGV[3] ~= '' and redis.call('HGET', KEYS[1], 'id:' .. ARGV[3])
if done then
  return {done == '0' and 'removed' or 'stored', done}
end

local function remember(version)
  if ARGV[3] == '' then
    return
  end
  local number = redis.call('HINCRBY', KEYS[1], 'changes', 1)
  local oldest = 'n:' .. number - 100
  local id = redis.call('HGET', KEYS[1], oldest)
  if id then
    redis.call('HDEL', KEYS[1], 'id:' .. id, oldest)
  end
  redis.call('HSET', KEYS[1], 'id:' .. ARGV[3], version, 'n:' .. number, ARGV[3])
end

local field = 'f:' .. ARGV[1]
local held = redis.call('HGET', KEYS[1], field)
local version, id, file = '0', '', ''
if held then
  version, id, file = string.match(held, '^(%d+) (%S*) (.*)$')
end
if ARGV[7] ~= '' and ARGV[3] ~= '' and id == ARGV[3] then
  return {'stored', version}
elseif ARGV[7] == '' and not held then
  if redis.call('EXISTS', KEYS[1]) == 1 then
    remember('0')
  end
  return {'removed', '0'}
elseif ARGV[2] ~= '' and ARGV[2] ~= version then
  return {'conflict', version, file}
end
local known = redis.call('HMGET', KEYS[1], 'last', 'files', 'born')
local files = tonumber(known[2] or 0)
if ARGV[7] == '' then
  redis.call('HDEL', KEYS[1], field)
  redis.call('HSET', KEYS[1], 'files', files - 1)
  remember('0')
  return {'removed', '0'}
elseif not held and files >= tonumber(ARGV[4]) then
  return {'full', tostring(files)}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fresh = string.format('%.0f', math.max(now, tonumber(known[1] or 0) + 1))
redis.call('HSET', KEYS[1], field, fresh .. ' ' .. ARGV[3] .. ' ' .. ARGV[7], 'last', fresh,
  'files', held and files or files + 1, 'born', known[3] or fresh)
remember(fresh)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[5])), ARGV[6])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('PEXPIRE', KEYS[2], redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2] - now)
return {'stored', fresh}
