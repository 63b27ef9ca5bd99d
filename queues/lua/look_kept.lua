-- include: tag
-- Find parked tasks whose tokens of limits are to be renewed. Read-only.
-- KEYS  tasks that keep tokens
-- ARGV  largest number of tasks
-- returns  of each task {id, nonce and uses of its token as its record has them, '1' if it keeps the token: it is parked; else the
--          caller releases it}
local time = redis.call('TIME')
local tag = tag_of(KEYS[1])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local tasks = {}
for i = 1, #found do
  local of = redis.call('HMGET', tag .. 'record:' .. found[i], 'state', 'keeps')
  tasks[i] = {found[i], of[2] or '', of[1] == 'scheduled' and '1' or ''}
end
return tasks
