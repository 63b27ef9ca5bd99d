-- Begins a task of a caller's own id afresh, where it has ended or is not there.
-- KEYS  ready stream, mark of a closed partition, record, steps, log, dead-letter stream
-- ARGV  envelope, arguments, token of this call
-- returns  the state of one that has not ended; 'stored'; 'closed' where the partition takes nothing new: what had
--          ended here is gone, and the task is to be stored elsewhere
-- Atomic: what the former run left, a dead letter too, goes in the act that puts the new message on the stream. Asked
-- twice (a lost reply), it is known by the token that it was stored.
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
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 'closed'
end
local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[1], 'args', ARGV[2])
redis.call('HSET', KEYS[3], 'state', 'queued', 'entry', entry, 'token', ARGV[3])
return 'stored'
