-- The prelude of scripts that register a retention. The loader puts it in front of each script that has the line
-- `-- include: retention`.
-- register_retention(retentions, kept, valid): register that records of the partition are kept for a time, from now and
--   for as long as the registration is valid; both in milliseconds, `kept` as an argument of the script. The score of a
--   retention is the time until which it may be used. The key expires with the last record that it covers.
local function register_retention(retentions, kept, valid)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZADD', retentions, 'GT', now + valid, kept)
  local found, latest = redis.call('ZRANGE', retentions, 0, -1, 'WITHSCORES'), 0
  for i = 1, #found, 2 do
    local expiry = found[i + 1] + found[i]
    if expiry <= now then
      redis.call('ZREM', retentions, found[i])
    end
    latest = math.max(latest, expiry)
  end
  redis.call('PEXPIRE', retentions, latest - now)
end
