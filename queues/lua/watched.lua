-- The prelude of scripts that end a task: `watched` in the line `-- include:`.
-- is_watched(record): whether tasks wait for the end of this one.
-- put_notice(outbox, task, now): put an ended task into the outbox of its partition, in the act that ends it. The field
--   `kept` of its record has the retention, and the same rounded up: it has no TTL until its notice is delivered. Workers
--   look at what is left there three seconds later: the worker that has ended the task delivers at once.
local function is_watched(record)
  return redis.call('HEXISTS', record, 'watchers') == 1
end

local function put_notice(outbox, task, now)
  redis.call('ZADD', outbox, now + 3000, task)
end
