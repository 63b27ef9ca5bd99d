-- Store an agent's identity as a new version.
-- KEYS  identities of the agent
-- ARGV  expected version ('' for any), the identity, who changed it and why, most versions that are kept
-- returns  {1, version}, {0, version that is there}
-- Atomic: of two changes that expect one version, the second is refused. Bytes equal to the last version make no new one,
-- also where the one before is expected, so that a repeated call has no effect. With encryption, equal identities have
-- other bytes: the caller compares them, and expects the version that it has read.
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
local equal = version > 0 and redis.call('HGET', KEYS[1], 'v:' .. version) == ARGV[2]
local expected = tonumber(ARGV[1])
if expected and expected ~= version and not (equal and expected == version - 1) then
  return {0, version}
elseif equal then
  return {1, version}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
version = version + 1
local former = version - tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'version', version, 'v:' .. version, ARGV[2],
  'm:' .. version, string.format('%.0f', now) .. ' ' .. ARGV[3])
redis.call('HDEL', KEYS[1], 'v:' .. former, 'm:' .. former)
return {1, version}
