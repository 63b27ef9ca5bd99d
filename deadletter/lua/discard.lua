-- include: streams
-- Purge a dead letter: the entry, the record, the checkpoint and the log.
-- KEYS  dead-letter stream, record, steps, log, inbox, timeline
-- ARGV  entry id of the dead letter, id
-- returns  0 no such dead letter; 1 purged
-- Atomic: a task that was replayed meanwhile, or enqueued again under this id, keeps its record.
local holder = redis.call('HMGET', KEYS[2], 'state', 'dead')
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[6], '')
local streams = stream_keys(KEYS[2])
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
if not holder[1] or holder[2] == ARGV[1] then
  redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], unpack(streams))
  redis.call('ZREM', KEYS[6], ARGV[2])
end
return 1
