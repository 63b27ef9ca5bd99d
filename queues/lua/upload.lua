-- The prelude of scripts that store tasks with data that was uploaded before, in keys with a TTL: the uploads. The arguments
-- of a task with large arguments are a reference to their chunks.
-- complete(upload, args): whether the upload has all chunks: it may have expired, or a failover may have lost some.
-- take_upload(upload, key): make the upload a key of a task, without a TTL. Renaming takes the same time for any size. The
--   first write of a script: a user without the right to rename is refused before anything changes.
-- replace(key, upload, count): the same if the upload has anything, else delete what an expired task has left there.
local function complete(upload, args)
  return redis.call('HLEN', upload) == tonumber(string.match(args, '"chunks":(%d+)'))
end

local function take_upload(upload, key)
  redis.call('RENAME', upload, key)
  redis.call('PERSIST', key)
end

local function replace(key, upload, count)
  if count == '0' then
    redis.call('DEL', key)
  else
    redis.call('RENAME', upload, key)
    redis.call('PERSIST', key)
  end
end
