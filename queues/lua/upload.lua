-- The prelude of scripts that store tasks with large arguments. Their chunks were stored before, in a key with a TTL: the
-- upload. The arguments of such a task are a reference to them.
-- complete(upload, args): whether the upload has all chunks: it may have expired, or a failover may have lost some.
-- take_upload(upload, record): make the upload the record of a task that has none, without a TTL. Renaming takes the same
--   time for any size. The first write of a script: a user without the right to rename is refused before anything changes.
local function complete(upload, args)
  return redis.call('HLEN', upload) == tonumber(string.match(args, '"chunks":(%d+)'))
end

local function take_upload(upload, record)
  redis.call('RENAME', upload, record)
  redis.call('PERSIST', record)
end
