-- The prelude of scripts that wake a parked task.
-- is_woken_by(wakes, word): whether field `wakes` of a record, words separated by spaces, has this word: see park.lua.
-- wake(due_set, nudges, task, now): make a task due now, and notify a worker that sleeps until a later one. Return whether
--   it was due later.
local function is_woken_by(wakes, word)
  return wakes and string.find(' ' .. wakes .. ' ', ' ' .. word .. ' ', 1, true) ~= nil
end

local function wake(due_set, nudges, task, now)
  local first = redis.call('ZRANGE', due_set, 0, 0, 'WITHSCORES')
  local woken = redis.call('ZADD', due_set, 'XX', 'LT', 'CH', now, task) == 1
  if woken and now < tonumber(first[2]) then
    redis.call('XADD', nudges, 'MAXLEN', 16, '*', 'why', 'due')
  end
  return woken
end
