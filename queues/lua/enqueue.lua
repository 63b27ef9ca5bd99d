-- Puts tasks on the ready stream, each once: an id that has a record is left alone.
-- KEYS  ready stream, then one record per task
-- ARGV  envelope and arguments of each task, in the order of the records
-- returns  per task 1 where it was stored now, 0 where the id was already known
-- Atomic: record and message appear together, so a task that has one has the other.
local stored = {}
for i = 2, #KEYS do
  local at = (i - 2) * 2 + 1
  if redis.call('EXISTS', KEYS[i]) == 1 then
    stored[i - 1] = 0
  else
    local entry = redis.call('XADD', KEYS[1], '*', 'env', ARGV[at], 'args', ARGV[at + 1])
    redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry)
    stored[i - 1] = 1
  end
end
return stored
