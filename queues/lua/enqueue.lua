-- include: depth
-- Put tasks on the ready stream. A task whose id has a record already is left alone.
-- KEYS  ready stream, mark of a closed partition, timeline, then one record per task
-- ARGV  of each task, in the order of the records: id, envelope, arguments, and the names of the task and its app if the
--       envelope holds no more than these, else ''; then the number of waiting tasks from which on none is stored, if the
--       caller has a limit
-- returns  per task 1 stored now, 0 the id is known already, -1 the partition is closed, -3 too many tasks wait
-- Atomic: record, message and entry in the timeline appear together, and nothing is stored once the partition is closed.
-- The record has the payload as well, so that a task can be put back whose message another program has deleted.
-- A task that is known stays known after the partition was closed: the reply that said so was lost. The timeline gets its
-- TTL with the first outcome: a producer needs no right to give keys a TTL, with which it could delete them.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[3], '')
local closed = redis.call('EXISTS', KEYS[2]) == 1
local stored, times = {}, {}
local limit = tonumber(ARGV[(#KEYS - 3) * 5 + 1])
local room = limit and limit - waiting(KEYS[1], limit)
for i = 4, #KEYS do
  local at = (i - 4) * 5 + 1
  if redis.call('EXISTS', KEYS[i]) == 1 then
    stored[i - 3] = 0
  elseif closed then
    stored[i - 3] = -1
  elseif room and room <= 0 then
    stored[i - 3] = -3
  else
    local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[at + 1], 'args', ARGV[at + 2])
    if ARGV[at + 3] == '' then
      redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry, 'env', ARGV[at + 1], 'args', ARGV[at + 2])
    elseif ARGV[at + 4] == '' then
      redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry, 'task', ARGV[at + 3], 'args', ARGV[at + 2])
    else
      redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry, 'task', ARGV[at + 3], 'app', ARGV[at + 4],
        'args', ARGV[at + 2])
    end
    times[#times + 1] = string.match(entry, '^%d+')
    times[#times + 1] = ARGV[at]
    stored[i - 3] = 1
    room = room and room - 1
  end
end
if times[1] then
  redis.call('ZADD', KEYS[3], unpack(times))
end
return stored
