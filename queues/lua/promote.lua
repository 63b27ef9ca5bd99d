-- Move due tasks to the ready stream.
-- KEYS  due set, ready stream, then one record per id
-- ARGV  ids, in the order of the records
-- returns  the number of tasks that were moved now
-- Atomic per task: it is in the due set or on the stream, never both, never neither. An id that is no longer due,
-- because another worker promoted it or it was cancelled, is left alone. The task leaves the due set first: a full
-- server then accepts the rest (see fence.lua), which needs no more memory than before. All scores are read before,
-- because the last task that leaves deletes the due set (see fence.lua).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local moved = 0
local scores = {}
for i = 3, #KEYS do
  scores[i] = redis.call('ZSCORE', KEYS[1], ARGV[i - 2])
end
for i = 3, #KEYS do
  if scores[i] and tonumber(scores[i]) <= now then
    redis.call('ZREM', KEYS[1], ARGV[i - 2])
    local payload = redis.call('HMGET', KEYS[i], 'env', 'args')
    if payload[1] then
      local entry = redis.call('XADD', KEYS[2], '*', 'env', payload[1], 'args', payload[2] or '{}', 'again', '1')
      redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry)
      redis.call('HDEL', KEYS[i], 'env', 'args', 'waits', 'wakes', 'returned')
      moved = moved + 1
    end
  end
end
return moved
