-- Prelude of every act on a delivery (the loader puts it in front of scripts that say `-- include: fence`).
-- A fence is (group, worker, entry, delivery count), the first four ARGV of such a script.
-- fence_text(): the delivery as a record remembers it; the worker stands beside it in a field of its own
-- owned():   is the entry still pending, on this worker, in this very delivery? (pcall: where the server was emptied
--            there is no group, and nothing is anybody's)
-- settled(): did this same delivery already settle (the reply was lost and the caller asks again)?
-- begin_outcome(): the first write of every outcome. It frees a little, and it lets the script through where memory is
--            full: Redis refuses a write that may need memory only as long as the script has not written anything
-- close():   acknowledges and deletes the message, and remembers which delivery did so.
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

local function begin_outcome(record)
  redis.call('HDEL', record, 'entry', 'step', 'alive', 'suspect')
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

-- The message's fields move into the record: there is one copy of the payload, always.
local function keep_payload(stream, record)
  local found = redis.call('XRANGE', stream, ARGV[3], ARGV[3])[1]
  redis.call('HSETNX', record, 'at', string.match(ARGV[3], '^%d+'))
  if found then
    for i = 1, #found[2], 2 do
      local name = found[2][i]
      if name == 'env' or name == 'args' then
        redis.call('HSET', record, name, found[2][i + 1])
      end
    end
  end
end
