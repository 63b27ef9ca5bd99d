-- The prelude of scripts that touch a partition: the heartbeat, the sweep, and the search for due tasks.
-- touch(seen, stream, group, lease, released): store the time, so that the next script can see how long no worker has
--   reached the partition. Restart every lease if that was longer than half a lease, or if the clock was set back by
--   as much: Redis was away, or its clock was set, or no worker ran. The leases passed then without a chance to renew
--   them. Returns {time in milliseconds, milliseconds since the previous touch (0: unknown), restarted leases}, and
--   whether leases are left to restart: then the time is stored with the first entry to look at next, the next touch
--   continues there, and nothing may be claimed before the last one.
-- One call restarts a bounded number of leases, because it blocks the server. JUSTID leaves the delivery counts as they
-- are. Released messages stay claimable, so they are left out. The PEXPIRE lets the SET through: a full server accepts
-- the rest of a script once it has written.
local MAX_RESTARTS = 250
local function touch(seen, stream, group, lease, released)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local last, start = string.match(redis.call('GET', seen) or '', '^(%d+) ?(.*)$')
  local restarted = 0
  if not last or math.abs(now - last) > lease / 2 then
    start = '-'
  end
  if start ~= '' then
    local page = redis.pcall('XPENDING', stream, group, start, '+', MAX_RESTARTS)
    local held = {}
    for i = 1, #page do
      local entry, owner = page[i][1], page[i][2]
      if owner ~= released then
        held[owner] = held[owner] or {}
        table.insert(held[owner], entry)
      end
    end
    for owner, entries in pairs(held) do
      restarted = restarted + #entries
      table.insert(entries, 'JUSTID')
      redis.call('XCLAIM', stream, group, owner, 0, unpack(entries))
    end
    start = page[MAX_RESTARTS] and ' (' .. page[MAX_RESTARTS][1] or ''
  end
  redis.call('PEXPIRE', seen, 3600000)
  redis.call('SET', seen, now .. start, 'PX', 3600000)
  return {now, last and now - last or 0, restarted}, start ~= ''
end
