-- Put tasks on the ready stream. A task whose id has a record already is left alone.
-- KEYS  ready stream, mark of a closed partition, then one record per task
-- ARGV  envelope and arguments of each task, in the order of the records
-- returns  per task 1 stored now, 0 the id is known already, -1 the partition is closed
-- Atomic: record and message appear together, and nothing is stored once the partition is closed. A task that is known
-- stays known after the partition was closed: the reply that said so was lost.
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
