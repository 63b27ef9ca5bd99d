-- include: streams, tag, turns
-- Delete a task in whatever state it is, with all that it has said.
-- KEYS  ready stream, record, steps, log, inbox, control, due set, dead-letter stream, timeline
-- ARGV  group, first character of the consumers that are not workers, id, id of its successor as the caller has read it
--       ('' for none), channel of a worker, without its id
-- returns  1 deleted; 0 there is no such task; -1 it has another successor, which the caller must delete first
-- Atomic: a worker that runs the task has lost its lease when this returns, so that nothing it writes later is stored.
-- Idempotent. The notification of the worker is a hint: without it, it sees that when it next renews the lease.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[7], '')
redis.call('XRANGE', KEYS[8], '0-0', '0-0')
redis.call('ZSCORE', KEYS[9], '')
local known = redis.call('HMGET', KEYS[2], 'entry', 'dead', 'handed_to', 'gate')
if (known[3] or '') ~= ARGV[4] then
  return -1
end
local streams = stream_keys(KEYS[2])
local tag, key_id, ring = line_of(KEYS[2], known[4], true)
redis.call('ZREM', KEYS[7], ARGV[3])
redis.call('ZREM', KEYS[9], ARGV[3])
if tag then
  local time = redis.call('TIME')
  leave_line(tag, ARGV[3], key_id, ring, time[1] * 1000)
end
if known[2] then
  redis.call('XDEL', KEYS[8], known[2])
end
local holder
if known[1] then
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], known[1], known[1], 1)
  holder = pending[1] and pending[1][2]
  redis.pcall('XACK', KEYS[1], ARGV[1], known[1])
  redis.call('XDEL', KEYS[1], known[1])
end
if redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], unpack(streams)) == 0 then
  return 0
end
redis.call('PUBLISH', KEYS[2], 'forgotten')
if holder and string.sub(holder, 1, 1) ~= ARGV[2] then
  redis.pcall('PUBLISH', ARGV[5] .. holder, ARGV[3])
end
return 1
