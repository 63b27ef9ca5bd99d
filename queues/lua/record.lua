-- include: fence
-- Writes into the checkpoint of a running task.
-- KEYS  ready stream, record, steps, log
-- ARGV  fence (4), then quadruples: kind, step key, value, log data
--       done: the step's result; intent: it is about to act; saved: its own progress
-- returns  0 refused, the lease has passed; 1 stored; 2 stored, and cancellation was requested
-- Atomic: all of the writes or none. Asked twice (a lost reply), it stores the same and logs once.
if not owned(KEYS[1]) then
  return 0
end
for i = 5, #ARGV, 4 do
  local kind, step, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if kind == 'done' then
    if redis.call('HGET', KEYS[3], 'd:' .. step) ~= value then
      redis.call('HSET', KEYS[3], 'd:' .. step, value)
      redis.call('HDEL', KEYS[3], 'i:' .. step, 's:' .. step)
      redis.call('XADD', KEYS[4], '*', 'type', 'step_completed', 'step', step, 'data', ARGV[i + 3])
      redis.call('PUBLISH', KEYS[2], 'step_completed')
    end
  elseif kind == 'intent' then
    redis.call('HSET', KEYS[3], 'i:' .. step, value)
  else
    redis.call('HSET', KEYS[3], 's:' .. step, value)
  end
end
if redis.call('HEXISTS', KEYS[2], 'cancel') == 1 then
  return 2
end
return 1
