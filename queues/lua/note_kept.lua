-- include: tag
-- Note when the tokens of parked tasks are renewed next, and which tasks keep none any more.
-- KEYS  tasks that keep tokens
-- ARGV  milliseconds until the next renewal, then of each task: id, nonce and uses of its token as looked at, '1' if it was renewed,
--       '' if it is gone, or the task is not parked any more
-- returns  the number of tasks that are left
-- Atomic per task. Idempotent. A task that was promoted or parked since the look, and so late bytes, find another token in its
-- record, or none, and what that act has noted stays.
local tag = tag_of(KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = redis.call('ZCARD', KEYS[1])
for i = 2, #ARGV, 3 do
  local record = tag .. 'record:' .. ARGV[i]
  local keeps = redis.call('HGET', record, 'keeps') or ''
  if keeps == ARGV[i + 1] and left > 0 then
    if ARGV[i + 2] == '1' then
      redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[i])
    else
      left = left - redis.call('ZREM', KEYS[1], ARGV[i])
      redis.call('HDEL', record, 'keeps')
    end
  end
end
return left
