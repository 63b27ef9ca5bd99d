-- The prelude of scripts that settle or write for a delivery: the loader puts it in front of each script that has the
-- line `-- include: fence`. The first four ARGV of such a script are the fence: group, worker, entry, delivery count.
-- No script lowers a delivery count, and each hand-out raises it, so a fence never occurs twice: bytes of a former
-- delivery that arrive late are refused.
-- No script uses a key that it has deleted, or whose last field it has removed: while a slot of a cluster migrates, its
-- node refuses a key that does not exist, and the script would end in its middle.
-- fence_text(): the fence as the record stores it; the worker is in a field of its own.
-- owned(stream): whether the entry is still pending on this worker, with this delivery count. XPENDING runs through
--   pcall: an emptied server has no group, and then no delivery is owned.
-- settled(record): whether this delivery has settled already: its reply was lost, and the caller asks again.
-- gap(record, number): whether Redis has lost the entry with this number, the last that the run stored (0: it stored
--   none): then the answer for the run, -1 - N; N is the number of the last entry that the record has. An outcome is
--   stored only with all entries that it follows from: the run sends the missing ones again, or gives up.
-- begin_outcome(stream, record): the first write of every outcome. It frees memory, and Redis lets a script through on a
--   full server once it has written: only the first write that may need memory is refused. A record
--   without a payload gets that of the message: an earlier version has stored it, or another program the message.
-- count_returned(record): count this delivery among those of the message that ended without an outcome and without a
--   crash (field returned; begin_outcome deletes it). A missing record stays missing: it would have no TTL.
-- close(stream, record): acknowledge and delete the message, and store the fence that did so.
-- now_ms(): the time of Redis in milliseconds.
-- put_off(due_set, nudges, record, task, due): add the task to the due set, and wake a worker that sleeps until a later
--   one. The record keeps the time, should the due set be lost (see put_back.lua), and that of the enqueue.
-- end_attempt(record, steps, first, ttl): change the checkpoint for the next attempt: from this index on, ARGV has pairs of a
--   field and its value; an empty value deletes the field. `head:N` is the head of the hash chain, in the record, if N entries
--   are stored: after a lost reply, the run does not know whether its last ones are.
--   ttl: of the checkpoint in milliseconds. Called last.
local function fence_text()
  return ARGV[3] .. ' ' .. ARGV[4]
end

local function owned(stream)
  local pending = redis.pcall('XPENDING', stream, ARGV[1], ARGV[3], ARGV[3], 1)[1]
  return pending and pending[2] == ARGV[2] and tostring(pending[4]) == ARGV[4]
end

local function settled(record)
  local last = redis.call('HMGET', record, 'settled', 'worker')
  return last[1] == fence_text() and last[2] == ARGV[2]
end

local function gap(record, number)
  local last = number == '0' and 0 or tonumber(redis.call('HGET', record, 'entries') or 0)
  return last < tonumber(number) and -1 - last
end

local function begin_outcome(stream, record)
  redis.call('HDEL', record, 'entry', 'run', 'began', 'alive', 'step', 'step_at', 'suspect', 'returned')
  if redis.call('HEXISTS', record, 'args') == 0 then
    local found = redis.call('XRANGE', stream, ARGV[3], ARGV[3])[1]
    for i = 1, found and #found[2] or 0, 2 do
      local name = found[2][i]
      if name == 'env' or name == 'args' then
        redis.call('HSET', record, name, found[2][i + 1])
      end
    end
  end
end

local function count_returned(record)
  return redis.call('EXISTS', record) == 1 and redis.call('HINCRBY', record, 'returned', 1)
end

local function close(stream, record)
  redis.call('XACK', stream, ARGV[1], ARGV[3])
  redis.call('XDEL', stream, ARGV[3])
  redis.call('HSET', record, 'settled', fence_text())
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function put_off(due_set, nudges, record, task, due)
  redis.call('HSETNX', record, 'at', string.match(ARGV[3], '^%d+'))
  redis.call('HSET', record, 'due', due)
  local first = redis.call('ZRANGE', due_set, 0, 0, 'WITHSCORES')
  redis.call('ZADD', due_set, due, task)
  if not first[2] or due < tonumber(first[2]) then
    redis.call('XADD', nudges, 'MAXLEN', 16, '*', 'why', 'due')
  end
end

local function end_attempt(record, steps, first, ttl)
  for i = first, #ARGV, 2 do
    local entries = string.match(ARGV[i], '^head:(%d+)$')
    if entries then
      if entries == redis.call('HGET', record, 'entries') then
        redis.call('HSET', record, 'head', ARGV[i + 1])
      end
    elseif ARGV[i + 1] ~= '' then
      redis.call('HSET', steps, ARGV[i], ARGV[i + 1])
      if ttl then
        redis.call('PEXPIRE', steps, ttl)
      end
    end
  end
  for i = first, #ARGV, 2 do
    if ARGV[i + 1] == '' then
      redis.call('HDEL', steps, ARGV[i])
    end
  end
end
