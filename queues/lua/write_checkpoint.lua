-- include: fence, inbox, waits, values
-- Write entries into the checkpoint and the event log of a running task.
-- KEYS  ready stream, record, steps, log, inbox, control, index of tasks with open waits, then two for each stream that the
--       entries name: the stream and the digests of its keyed items. The index is there if an entry is of a wait or a stream
-- ARGV  fence (4), number of the first entry, head of the hash chain with these entries ('' without a key), then
--       quadruples: kind, step key, value, log data
--       done: the step's result, logged as step_completed; mark: the same for a step that has an event of its own;
--       intent: the step is about to act, or is not any more (empty value); saved: its own progress; drop: delete its result, intent and progress;
--       base: an event as below, from which the log may start: entries before the former one are deleted;
--       event: the event type in place of the step key, its number in place of the value; taken: the run used the
--       inbox message of that number; moved: the value is the id of the successor, which gets the messages that come
--       from now on; progress: the value is the progress that the handler reports, which replaces the last one;
--       excuse: the entries of this call are progress that no earlier run had stored, so the crashes before it count no
--       more in a row, but within a window; the event type in place of the step key, the value is the number of the
--       task's crashes so far and the window in milliseconds;
--       wait: open a wait, or open it again without the answer that it has: its id in place of the step key, what people
--       need to answer it as the value, and in place of the log data the time after which it takes none (ms, 0: never),
--       1 if it takes an answer that came early, and the task id; answered: close a wait: its id in place of the step
--       key, the digest of the answer's id as the value (empty without an answer), the task id in place of the log data;
--       emitted: an item of a stream: in place of the step key the name of the stream, the number of items that it keeps,
--       the try, the position, the unit, or for a keyed item `key` and the digest in place of the last three; cut: a mark
--       that voids items: the name of the stream, the try, the unit; emits: the note of what a unit has emitted, in place
--       of the step key its field (an empty value deletes it);
--       value: set the named value of the task whose name is in place of the step key, with its age in milliseconds in
--       place of the log data: nothing is set if the value was changed from outside since;
--       chunk, part: a chunk of a large step result, of the task's result, by its name, which an entry of
--       a later call refers to (an empty value deletes the chunk). The value of a drop has the digest and the number of the step's chunks, if it has any
-- returns  0 refused, the lease has passed; -1 - N refused: entries before the first one are missing, N is the number of
--          the last entry that is stored; {1 stored or 2 stored, and cancellation was requested; number of the last
--          message that was sent to the task, 0 for none}
-- Atomic: all entries or none. Idempotent: entries are numbered over all runs of the task (field entries: the number of
-- the last one), and those that are stored already are skipped, however late they arrive. A stored checkpoint never has
-- a gap: where Redis has lost its last second, the run sends the missing entries again. A run that starts with entry 1, where
-- another delivery has written that (field `first`), knows nothing of the checkpoint: another program has made the group
-- read the message again (XGROUP SETID, XGROUP DESTROY). It is refused, and the claim after its lease continues.
-- A window starts with the first crash that is excused after the last one has ended. Progress alone begins with a write
-- that frees memory, so that a full server accepts it (see fence.lua): it must not delay the outcome.
-- The items of a stream have the ids 1-0, 2-0, 3-0, ... (stream_items.py), and one message on its channel says the last.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not (pending and pending[2] == ARGV[2] and tostring(pending[4]) == ARGV[4]) then
  return 0
end
local asked = redis.call('HEXISTS', KEYS[6], 'cancel') + 1
local latest = redis.call('HGET', KEYS[5], 'last')
latest = latest and #latest <= 14 and string.match(latest, '^%d+$') and tonumber(latest) or 0
local known = redis.call('HMGET', KEYS[2], 'entries', 'events', 'first')
local last, events = tonumber(known[1] or 0), known[2]
local number = tonumber(ARGV[5])
local writer = number == 1 and ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4]
if writer and last > 0 and known[3] and known[3] ~= writer then
  return 0
end
if last < number - 1 then
  return -1 - last
end
-- New results of plain steps alone, which nearly all calls write, need no functions: a call of the script creates each.
local plain = not KEYS[7] and last == number - 1 and ARGV[7]
for i = 7, plain and #ARGV or 0, 4 do
  plain = plain and ARGV[i] == 'done'
end
if plain then
  for i = 7, #ARGV, 4 do
    local step = ARGV[i + 1]
    redis.call('HSET', KEYS[3], 'd:' .. step, ARGV[i + 2])
    redis.call('HDEL', KEYS[3], 'i:' .. step, 's:' .. step)
    redis.call('XADD', KEYS[4], '*', 'type', 'step_completed', 'step', step, 'data', ARGV[i + 3], 'e', number)
    redis.call('PUBLISH', KEYS[2], 'step_completed')
    number = number + 1
  end
  if ARGV[6] ~= '' then
    redis.call('HSET', KEYS[2], 'entries', number - 1, 'head', ARGV[6])
  else
    redis.call('HSET', KEYS[2], 'entries', number - 1)
  end
  if writer then
    redis.call('HSET', KEYS[2], 'first', writer)
  end
  return {asked, latest}
end

-- preludes
if KEYS[7] then
  -- a key of another type ends the script here, before its first write
  redis.call('ZSCORE', KEYS[7], '')
end
local streams, names, last_numbers, add_item, add_keyed
if #KEYS > 7 then
  streams, names, last_numbers = {}, redis.call('HGET', KEYS[2], 'streams') or '', {}
  for i = 8, #KEYS, 2 do
    local newest = redis.call('XREVRANGE', KEYS[i], '+', '-', 'COUNT', 1)[1]
    redis.call('ZSCORE', KEYS[i + 1], '')
    streams[string.match(KEYS[i], '[^:]*$')] = {at = i, last = newest and tonumber(string.match(newest[1], '^%d+')) or 0}
  end

  add_item = function(name, limit, ...)
    local stream, fields = streams[name], {...}
    local i, number = stream.at, stream.last + 1
    if not string.find(' ' .. names .. ' ', ' ' .. name .. ' ', 1, true) then
      names = names == '' and name or names .. ' ' .. name
      redis.call('HSET', KEYS[2], 'streams', names)
      redis.call('PUBLISH', KEYS[2], 'stream')
      redis.call('PERSIST', KEYS[i])
    end
    local now = string.format('%.0f', now_ms())
    local added = redis.pcall('XADD', KEYS[i], 'MAXLEN', '~', limit, string.format('%.0f-0', number), 't', now, unpack(fields))
    if type(added) == 'table' then
      -- another program has deleted the last entries, or has used up the ids
      local about = redis.pcall('XINFO', 'STREAM', KEYS[i])
      for at = 1, #about, 2 do
        if about[at] == 'last-generated-id' then
          number = tonumber(string.match(about[at + 1], '^%d+')) + 1
        end
      end
      if number > 9e15 then
        redis.call('DEL', KEYS[i])
        number = 1
      end
      redis.call('XADD', KEYS[i], 'MAXLEN', '~', limit, string.format('%.0f-0', number), 't', now, unpack(fields))
    end
    stream.last, last_numbers[i] = number, string.format('%.0f', number)
    return number
  end

  add_keyed = function(name, limit, digest, value)
    local i = streams[name].at + 1
    if not redis.call('ZSCORE', KEYS[i], digest) then
      local number = add_item(name, limit, 'u', '', 'k', digest, 'd', value)
      redis.call('ZADD', KEYS[i], number, digest)
      redis.call('ZREMRANGEBYRANK', KEYS[i], 0, -limit - 1)
      redis.call('HSET', KEYS[2], 'keyed', '1')
    end
  end
end
local alone = ARGV[7] == 'progress'
for i = 11, alone and #ARGV or 0, 4 do
  alone = alone and ARGV[i] == 'progress'
end
local taken = false
for i = 7, #ARGV, 4 do
  local kind, step, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if number <= last then
    kind = 'stored'
  end
  if kind == 'done' then
    redis.call('HSET', KEYS[3], 'd:' .. step, value)
    redis.call('HDEL', KEYS[3], 'i:' .. step, 's:' .. step)
    redis.call('XADD', KEYS[4], '*', 'type', 'step_completed', 'step', step, 'data', ARGV[i + 3], 'e', number)
    redis.call('PUBLISH', KEYS[2], 'step_completed')
  elseif kind == 'event' then
    events = value
    redis.call('XADD', KEYS[4], '*', 'type', step, 'n', value, 'data', ARGV[i + 3], 'e', number)
    redis.call('PUBLISH', KEYS[2], step)
  elseif kind == 'base' then
    events = value
    local id = redis.call('XADD', KEYS[4], '*', 'type', step, 'n', value, 'data', ARGV[i + 3], 'e', number)
    local former = redis.call('HGET', KEYS[2], 'base')
    if former then
      redis.call('XTRIM', KEYS[4], 'MINID', former)
    end
    redis.call('HSET', KEYS[2], 'base', id)
    redis.call('PUBLISH', KEYS[2], step)
  elseif kind == 'mark' then
    redis.call('HSET', KEYS[3], 'd:' .. step, value)
    redis.call('HDEL', KEYS[3], 'i:' .. step, 's:' .. step)
  elseif kind == 'drop' then
    redis.call('HDEL', KEYS[3], 'd:' .. step, 'i:' .. step, 's:' .. step)
    local digest, chunks = string.match(value, '^(%x+) (%d+)$')
    for chunk = 0, (chunks or 0) - 1 do
      redis.call('HDEL', KEYS[3], 'c:' .. digest .. ':' .. chunk)
    end
  elseif kind == 'chunk' then
    if value == '' then
      redis.call('HDEL', KEYS[3], 'c:' .. step)
    else
      redis.call('HSET', KEYS[3], 'c:' .. step, value)
    end
  elseif kind == 'emitted' then
    local name, limit, try, rest = string.match(step, '^(%S+) (%d+) (%S+) (.*)$')
    if try ~= 'key' then
      local position, unit = string.match(rest, '^(%d+) (.*)$')
      add_item(name, limit, 'u', unit, 'y', try, 'n', position, 'd', value)
    else
      add_keyed(name, limit, rest, value)
    end
  elseif kind == 'cut' then
    local name, try, unit = string.match(step, '^(%S+) (%d+) (.*)$')
    add_item(name, 10000, 'u', unit, 'y', try, 'cut', '1')
  elseif kind == 'emits' then
    if value == '' then
      redis.call('HDEL', KEYS[3], 'e:' .. step)
    else
      redis.call('HSET', KEYS[3], 'e:' .. step, value)
    end
  elseif kind == 'part' then
    redis.call('HSET', KEYS[2], 'result:' .. step, value)
  elseif kind == 'taken' then
    redis.call('HDEL', KEYS[5], 'm:' .. step)
    taken = true
  elseif kind == 'wait' then
    open_wait(KEYS[5], KEYS[7], KEYS[2], step, value, ARGV[i + 3], number)
  elseif kind == 'answered' then
    close_wait(KEYS[5], KEYS[7], ARGV[i + 3], step, value)
  elseif kind == 'value' then
    local now, age = now_ms(), tonumber(ARGV[i + 3])
    local outside = inbox_number(redis.call('HGET', KEYS[5], 'o:' .. step))
    -- a time ahead of the clock, which was set back, is no later change
    if not age or outside <= now - age or outside > now then
      set_value(KEYS[5], KEYS[2], step, value, nil)
    end
  elseif kind == 'moved' then
    redis.call('HSET', KEYS[2], 'handed_to', value)
  elseif kind == 'intent' then
    if value == '' then
      redis.call('HDEL', KEYS[3], 'i:' .. step)
    else
      redis.call('HSET', KEYS[3], 'i:' .. step, value)
    end
  elseif kind == 'saved' then
    redis.call('HSET', KEYS[3], 's:' .. step, value)
  elseif kind == 'progress' then
    if alone then
      redis.call('HDEL', KEYS[2], 'progress')
    end
    redis.call('HSET', KEYS[2], 'progress', value, 'progress_at', now_ms())
    redis.call('PUBLISH', KEYS[2], 'progress')
  elseif kind == 'excuse' then
    local crashes, window = string.match(value, '^(%d+) (%d+)$')
    local counts = redis.call('HMGET', KEYS[2], 'excused', 'recent', 'recent_at')
    local recent, since, now = counts[2], counts[3], now_ms()
    if now - tonumber(since or 0) > tonumber(window) then
      recent, since = 0, now
    end
    recent = tonumber(recent or 0) + tonumber(crashes) - tonumber(counts[1] or 0)
    redis.call('HSET', KEYS[2], 'excused', crashes, 'recent', recent, 'recent_at', since)
    redis.call('XADD', KEYS[4], '*', 'type', step, 'data', '{"excused":' .. crashes .. '}')
  end
  number = number + 1
end
if number - 1 > last then
  local counts = {'entries', number - 1}
  if events then
    counts[3], counts[4] = 'events', events
  end
  if ARGV[6] ~= '' then
    counts[#counts + 1], counts[#counts + 2] = 'head', ARGV[6]
  end
  redis.call('HSET', KEYS[2], unpack(counts))
end
if writer and last == 0 then
  redis.call('HSET', KEYS[2], 'first', writer)
end
for i = 8, #KEYS, 2 do
  if last_numbers[i] then
    redis.call('PUBLISH', KEYS[i], last_numbers[i])
  end
end
if taken then
  local used, sent = inbox_counts(KEYS[5], 1000)
  redis.call('HSET', KEYS[5], 'used', first_unread(KEYS[5], used, sent))
end
return {asked, latest}
