-- The prelude of the scripts of the key-value store.
-- A namespace of the store is one hash slot, mostly another one than that of the task that uses it. So no script can look
-- whether a delivery still has its message. In its place each access of a task, a read as well, carries the token of its
-- delivery (task, entry id of the message, delivery count), and the namespace keeps the newest token of each task.
-- An older one is refused. Each hand-out of a message raises the count, and each new message of a task has a larger entry
-- id, so tokens of a task only grow. Hence, once a run has looked at a namespace, nothing that an earlier run of the task
-- sends, or has sent and arrives late, has an effect there; what came before that look, the later run sees.
-- A token is kept for seven days after its last use, and those of the last 100,000 tasks. Entry ids follow the clock of
-- the server of the queue: a task that a resharding moves to another server needs clocks that differ by less than the time
-- between its deliveries.
-- now: the time of Redis in milliseconds.
-- text(number): a number as the digits of a whole one.
-- newer(fences, at): the token that is newer than that of this access, as `MS-SEQ COUNT`; false without one. at: index
--   in ARGV of the task ('' outside of a task), ms and sequence number of its entry, delivery count.
-- note(fences, users, at): keep the token, after `newer`.
-- alive(packed): whether a stored entry, `VERSION EXPIRES FORM DATA`, exists and has not expired.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local KEPT, MOST = 7 * 86400000, 100000

local function text(number)
  return string.format('%.0f', number)
end

local function newer(fences, at)
  local held = ARGV[at] ~= '' and redis.call('HGET', fences, ARGV[at])
  if not held then
    return false
  end
  local theirs = {string.match(held, '^(%d+)-(%d+) (%d+)$')}
  for i = 1, 3 do
    local own, other = tonumber(ARGV[at + i]), tonumber(theirs[i] or 0)
    if own ~= other then
      return own < other and held
    end
  end
  return false
end

local function note(fences, users, at)
  local task = ARGV[at]
  if task == '' then
    return
  end
  local token = ARGV[at + 1] .. '-' .. ARGV[at + 2] .. ' ' .. ARGV[at + 3]
  local used = redis.call('ZSCORE', users, task)
  if used and tonumber(used) > now - 3600000 and redis.call('HGET', fences, task) == token then
    return
  end
  redis.call('HSET', fences, task, token)
  redis.call('ZADD', users, text(now), task)
  local old = redis.call('ZRANGEBYSCORE', users, '-inf', '(' .. text(now - KEPT), 'LIMIT', 0, 100)
  if #old == 0 and redis.call('ZCARD', users) > MOST then
    old = redis.call('ZRANGE', users, 0, 0)
  end
  if #old > 0 then
    redis.call('HDEL', fences, unpack(old))
    redis.call('ZREM', users, unpack(old))
  end
  redis.call('PEXPIRE', fences, KEPT)
  redis.call('PEXPIRE', users, KEPT)
end

local function alive(packed)
  local expires = packed and tonumber(string.match(packed, '^%d+ (%d+) '))
  return expires and (expires == 0 or expires > now)
end
