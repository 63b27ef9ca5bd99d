-- The prelude of scripts that end a task: `watched` in the line `-- include:`.
-- is_watched(record): whether tasks wait for the end of this one.
-- put_notice(outbox, record, task, kept, registered, now): put an ended task into the outbox of its partition, in the act that
--   ends it. Its record keeps the retention that it gets once the notice is delivered, and has no TTL until then. Workers
--   look at what is left there three seconds later: the worker that has ended the task delivers at once.
local function is_watched(record)
  return redis.call('HEXISTS', record, 'watchers') == 1
end

local function put_notice(outbox, record, task, kept, registered, now)
  redis.call('HSET', record, 'kept', kept .. ' ' .. registered)
  redis.call('ZADD', outbox, now + 3000, task)
  redis.call('PERSIST', record)
end
