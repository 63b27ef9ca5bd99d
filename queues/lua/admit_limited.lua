-- include: tag, turns
-- Move tasks that have tokens from their waiting lists to the ready stream, and note when the others are looked at again.
-- KEYS  rings, ready stream, then turns of each ring, waiting list of each KEYID, record of each task
-- ARGV  number of tasks, of KEYIDs and of rings, time of the look, then of each task: id, KEYID, RING, place, fence of its
--       last delivery, nonce of its token; of each KEYID: KEYID, RING, its score as look_limited.lua returned it, what comes
--       next (milliseconds until the next look; 0 for after all others; -1: as it is), number of members to remove, then
--       these; of each ring: RING, its score, milliseconds for which none of its tasks can start, 0 for none
-- returns  {milliseconds until the next look, -1 for none, answers: per task 1 admitted now, 0 it does not wait there any
--          more: the caller releases its token}
-- Atomic per task: it is in its waiting list or on the stream, never both, never neither. One that was admitted, moved or
-- cancelled since the look has no such state, place or fence any more: a retry of an ordered KEYID has the same place.
-- Tasks of ordered KEYIDs stay in their list until they end.
-- A mover that was frozen since its look admits none: its tokens may have expired, and a worker that gets a new message starts
-- its task without another look (worker/durable/limit_tokens.py).
-- A KEYID or ring that another call has changed since the look keeps what that has noted: it has seen more. Members are
-- removed only if they still do not wait there. Nothing is read from a list or ring after its last member has left (see fence.lua).
local tag = tag_of(KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local counts = {tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])}
local at, fresh = 4, math.abs(now - tonumber(ARGV[4])) < 10000
local tasks, lines, rings, sizes, changed = {}, {}, {}, {}, {}

local function count(key)
  sizes[key] = sizes[key] or redis.call('ZCARD', key)
  return sizes[key]
end

local function remove(key, member)
  if count(key) > 0 and redis.call('ZREM', key, member) == 1 then
    sizes[key] = sizes[key] - 1
    changed[key] = true
  end
end

-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[2], '0-0', '0-0')
count(KEYS[1])
for i = 3, #KEYS do
  if i <= 2 + counts[2] + counts[3] then
    count(KEYS[i])
  end
end
for i = 1, counts[1] do
  local task = {id = ARGV[at + 1], key_id = ARGV[at + 2], ring = ARGV[at + 3], place = ARGV[at + 4], fence = ARGV[at + 5], nonce = ARGV[at + 6]}
  task.list, task.record = tag .. 'limited:' .. task.key_id, tag .. 'record:' .. task.id
  task.of = redis.call('HMGET', task.record, 'state', 'gate', 'settled', 'watchers', 'env', 'args')
  count(task.list)
  tasks[i] = task
  at = at + 6
end
for i = 1, counts[2] do
  local line = {key_id = ARGV[at + 1], ring = ARGV[at + 2], score = tonumber(ARGV[at + 3]), next = tonumber(ARGV[at + 4]), gone = {}}
  line.list, line.turns = tag .. 'limited:' .. line.key_id, tag .. 'turns:' .. line.ring
  count(line.list)
  line.same = count(line.turns) > 0 and tonumber(redis.call('ZSCORE', line.turns, line.key_id) or -1) == line.score
  for member = 1, tonumber(ARGV[at + 5]) do
    local id = ARGV[at + 5 + member]
    local of = redis.call('HMGET', tag .. 'record:' .. id, 'state', 'gate')
    local live = of[1] == 'limited' or (string.sub(line.key_id, 1, 1) == 'o' and (of[1] == 'queued' or of[1] == 'scheduled'))
    local gate = of[2] and string.match(of[2], '^(%S+) ')
    local score = redis.call('ZSCORE', line.list, id)
    if not (live and gate == line.key_id and score and string.match(of[2], ' (%d+)$') == string.format('%.0f', score)) then
      line.gone[#line.gone + 1] = id
    end
  end
  lines[i] = line
  at = at + 5 + tonumber(ARGV[at + 5])
end
for i = 1, counts[3] do
  local ring = {name = ARGV[at + 1], full = tonumber(ARGV[at + 3])}
  ring.turns = tag .. 'turns:' .. ring.name
  count(ring.turns)
  ring.same = count(KEYS[1]) > 0 and tonumber(redis.call('ZSCORE', KEYS[1], ring.name) or -1) == tonumber(ARGV[at + 2])
  rings[i] = ring
  at = at + 3
end

local answers = {}
for i = 1, #tasks do
  local task = tasks[i]
  answers[i] = 0
  local gate = task.key_id .. ' ' .. task.ring .. ' ' .. task.place
  if fresh and task.of[1] == 'limited' and task.of[2] == gate and (task.of[3] or '') == task.fence then
    if task.of[5] then
      -- the task leaves its list first: a full server then accepts the rest (see fence.lua)
      if string.sub(task.key_id, 1, 1) ~= 'o' then
        remove(task.list, task.id)
      end
      local more = {'token', task.nonce}
      if task.of[3] then
        more[3], more[4] = 'again', '1'
      end
      if task.of[4] then
        more[#more + 1], more[#more + 2] = 'watched', '1'
      end
      local entry = redis.call('XADD', KEYS[2], '*', 'env', task.of[5], 'args', task.of[6] or '{}', unpack(more))
      redis.call('HSET', task.record, 'state', 'queued', 'entry', entry)
      answers[i] = 1
    end
  end
end
for i = 1, #lines do
  local line = lines[i]
  for _, id in ipairs(line.gone) do
    remove(line.list, id)
  end
  if count(line.list) == 0 then
    remove(line.turns, line.key_id)
  elseif line.same and line.next >= 0 then
    redis.call('ZADD', line.turns, line.next > 0 and now + line.next or now + i / 1000, line.key_id)
    changed[line.turns] = true
  end
end
for i = 1, #rings do
  local ring = rings[i]
  if ring.same and ring.full > 0 then
    if redis.call('ZADD', ring.turns, now + ring.full, '~') == 1 then
      sizes[ring.turns] = count(ring.turns) + 1
    end
  elseif ring.same then
    remove(ring.turns, '~')
  end
  local full, earliest = 0, nil
  local turns = count(ring.turns) > 0 and redis.call('ZRANGE', ring.turns, 0, 9, 'WITHSCORES') or {}
  for place = 1, #turns, 2 do
    if turns[place] == '~' then
      full = tonumber(turns[place + 1])
    elseif not string.match(turns[place], '^o?[%w._,-]+$') then
      remove(ring.turns, turns[place]) -- another program wrote it
    else
      earliest = earliest or tonumber(turns[place + 1])
    end
  end
  if not earliest then
    remove(ring.turns, '~')
    remove(KEYS[1], ring.name)
  elseif ring.same or changed[ring.turns] then
    if full == 0 then
      full = tonumber(redis.call('ZSCORE', ring.turns, '~') or 0)
    end
    local next = math.max(earliest, full)
    redis.call('ZADD', KEYS[1], next > now and next or now, ring.name)
  end
end
local first = count(KEYS[1]) > 0 and redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {first and math.max(0, math.ceil(math.min(tonumber(first) - now, 1e9))) or -1, answers}
