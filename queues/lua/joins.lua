-- The prelude of scripts that read or change a join: `joins` in the line `-- include:`. A join has three keys: its hash, the
-- set of open children, and the list of children that are not launched (see joins.py).
-- join_over(join, launched, waiting, after): whether a task need not wait for the join any longer: all its children have
--   ended, or one that ends the join has died, or the join is gone or being closed; unless `after` is '', also if more children
--   than that have ended.
-- join_room(known, open): how many more children may be open; `known` has the field `limit`.
local function join_over(join, launched, waiting, after)
  local known = redis.call('HMGET', join, 'total', 'failed', 'closed')
  if not known[1] or known[2] or known[3] then
    return true
  end
  if after ~= '' and redis.call('HEXISTS', join, string.format('d:%.0f', after + 1)) == 1 then
    return true
  end
  return redis.call('SCARD', launched) + redis.call('LLEN', waiting) == 0
end

local function join_room(limit, open)
  return limit == 0 and math.huge or math.max(0, limit - open)
end
