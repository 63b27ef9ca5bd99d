-- The prelude of scripts that give a record its retention: `retention` in the line `-- include:`.
-- register_retention(retentions, kept, now): register that a record of the partition is kept for a time from now on; both
--   in milliseconds, `kept` rounded up to one of few values. The score of a retention is the time until which it may be
--   used. One that is registered anyway is registered for a minute in advance, so that most scripts only read. The key
--   expires with the last record that it covers.
-- A retention of more than 15 characters, or that is no number of milliseconds, is of another program: it is removed.
-- The registration is in the script that gives the record its retention: where Redis has lost the one, it has lost the
-- other.
local function register_retention(retentions, kept, now)
  local known = redis.call('ZSCORE', retentions, kept)
  if known and tonumber(known) >= now and tonumber(known) < 1e15 then
    return
  end
  redis.call('ZADD', retentions, now + 60000, kept)
  local found, latest = redis.call('ZRANGE', retentions, 0, -1, 'WITHSCORES'), 0
  for i = 1, #found, 2 do
    local until_ms = tonumber(found[i + 1])
    local own = #found[i] <= 15 and string.find(found[i], '^%d+$') and until_ms < 1e15
    local expiry = own and until_ms + found[i] or 0
    if expiry <= now then
      redis.call('ZREM', retentions, found[i])
    end
    latest = math.max(latest, expiry)
  end
  redis.call('PEXPIRE', retentions, latest - now)
end
