-- Puts tasks on the ready stream, each once: an id that has a record is left alone.
-- KEYS  ready stream, mark of a closed partition, then one record per task
-- ARGV  envelope and arguments of each task, in the order of the records
-- returns  per task 1 where it was stored now, 0 where the id was already known, -1 where the partition is closed
-- Atomic: record and message appear together, so a task that has one has the other; and nothing is stored once the
-- mark is there. A task that is known is known though the partition was closed since: the reply that said so was lost.
local closed = redis.call('EXISTS', KEYS[2]) == 1
local stored = {}
for i = 3, #KEYS do
  local at = (i - 3) * 2 + 1
  if redis.call('EXISTS', KEYS[i]) == 1 then
    stored[i - 2] = 0
  elseif closed then
    stored[i - 2] = -1
  else
    local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[at], 'args', ARGV[at + 1])
    redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry)
    stored[i - 2] = 1
  end
end
return stored
