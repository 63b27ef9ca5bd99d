-- The prelude of scripts that use the waits of a task, which are fields of its inbox: `inbox, waits` in the line
-- `-- include:`. Any client may write there, so what has another form counts as missing.
-- wait_name(id): the name of a wait with this id: without its scope and its number.
-- wait_counts(inbox, name): how many waits of this name were opened, how many were closed, and the digests of the last
--   answers that closed one, the latest first, with commas.
-- early_counts(inbox): the number and the bytes of the answers that came early.
-- open_wait(inbox, index, record, id, value, limits, number): open a wait, or open it again without its answer. limits:
--   the time after which it takes none, 1 if it takes the answer that came early, 1 if it was lost: then one that is
--   there is left as it is, task id. number: of the entry.
-- close_wait(inbox, index, task, id, digest): close a wait, and remember the digest of the answer's id.
-- that of 20 digests of 24 characters
local USED_LENGTH = 499

local function wait_name(id)
  return string.match(string.match(id, '[^/]*$'), '^[^#]*')
end

local function wait_counts(inbox, name)
  local opened, closed, digests = string.match(redis.call('HGET', inbox, 'c:' .. name) or '', '^(%d+) (%d+) ([%x,]*)$')
  return inbox_number(opened), inbox_number(closed), digests or ''
end

local function early_counts(inbox)
  local count, bytes = string.match(redis.call('HGET', inbox, 'early') or '', '^(%d+) (%d+)$')
  return inbox_number(count), inbox_number(bytes)
end

local function open_wait(inbox, index, record, id, value, limits, number)
  local name, until_ms, early, lost, task = wait_name(id), string.match(limits, '^(%d+) (%d) (%d) (.*)$')
  if lost == '1' and redis.call('HEXISTS', inbox, 'w:' .. id) == 1 then
    return
  end
  local opened, closed, digests = wait_counts(inbox, name)
  local kept = early == '1' and opened == 0 and redis.call('HGET', inbox, 'e:' .. name)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if redis.call('HSET', inbox, 'w:' .. id, now .. ' ' .. until_ms .. ' ' .. number .. ' ' .. value) == 1 then
    redis.call('HSET', inbox, 'c:' .. name, (opened + 1) .. ' ' .. closed .. ' ' .. digests,
      'open', inbox_number(redis.call('HGET', inbox, 'open')) + 1)
    redis.call('ZADD', index, 'NX', now, task)
  end
  if kept then
    local count, bytes = early_counts(inbox)
    redis.call('HSET', inbox, 'a:' .. id, kept,
      'early', math.max(0, count - 1) .. ' ' .. math.max(0, bytes - #kept))
    redis.call('HDEL', inbox, 'e:' .. name)
  else
    redis.call('HDEL', inbox, 'a:' .. id)
  end
  redis.call('PUBLISH', record, kept and 'answer' or 'wait')
end

local function close_wait(inbox, index, task, id, digest)
  local name = wait_name(id)
  if redis.call('HEXISTS', inbox, 'w:' .. id) == 1 then
    local opened, closed, digests = wait_counts(inbox, name)
    if string.match(digest, '^%x+$') then
      digests = string.sub(digest .. (digests == '' and '' or ',') .. digests, 1, USED_LENGTH)
    end
    local left = inbox_number(redis.call('HGET', inbox, 'open')) - 1
    redis.call('HSET', inbox, 'c:' .. name, opened .. ' ' .. (closed + 1) .. ' ' .. digests, 'open', math.max(0, left))
    redis.call('HDEL', inbox, 'w:' .. id, 'a:' .. id)
    if left <= 0 then
      redis.call('ZREM', index, task)
    end
  end
end
