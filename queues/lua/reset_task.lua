-- Store a task in the place of an ended one with the same id.
-- KEYS  ready stream, mark of a closed partition, record, steps, log, dead-letter stream, inbox
-- ARGV  envelope, arguments, token of this call
-- returns  the state of a task that has not ended; 'stored'; or 'closed' if the partition is closed: what an ended
--          task left here was deleted, and the caller stores the task in another partition
-- Atomic: what the earlier task left, a dead letter included, is deleted in the script that adds the new message.
-- Idempotent: after a lost reply, the token in the record shows that the task is stored.
local held = redis.call('HMGET', KEYS[3], 'state', 'dead', 'token')
if held[3] == ARGV[3] then
  return 'stored'
end
if held[1] and held[1] ~= 'succeeded' and held[1] ~= 'dead' and held[1] ~= 'cancelled' then
  return held[1]
end
if held[2] then
  redis.call('XDEL', KEYS[6], held[2])
end
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5], KEYS[7])
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 'closed'
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2])
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'token', ARGV[3])
return 'stored'
