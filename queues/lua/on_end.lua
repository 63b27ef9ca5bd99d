-- The prelude of scripts that end a task: `on_end` in the line `-- include:`.
-- enqueue_cleanup(ready, timeline, record, task, envelope, arguments): enqueue the clean-up task of a task, in the act that
--   ends that. Its id has the entry of the message that ends: it occurs once. A record that has the id all the same is
--   another program's: it is left alone. The partition may be closed: it is not retired while it has tasks.
local function enqueue_cleanup(ready, timeline, record, task, envelope, arguments)
  if redis.call('EXISTS', record) == 1 then
    return
  end
  local entry = redis.call('XADD', ready, '*', 'env', envelope, 'args', arguments)
  redis.call('HSET', record, 'state', 'queued', 'entry', entry, 'env', envelope, 'args', arguments)
  redis.call('ZADD', timeline, string.match(entry, '^%d+'), task)
end
