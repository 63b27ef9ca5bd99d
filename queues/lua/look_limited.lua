-- include: tag, turns, limited
-- Find tasks that wait for limits and have their turn. Read-only.
-- KEYS  rings, ready stream, lock of the worker that promotes the due tasks of the partition
-- ARGV  group, largest number of tasks, '1' for none while no worker has that lock (its KEYIDs are returned), number of
--       ordered limits whose tasks may run side by side, then name and number of each, then pairs of a KEYID and its RING
--       that are looked at whether they are due or not
-- returns  {time in milliseconds, milliseconds for which the next message of the ready stream has waited, tasks, KEYIDs,
--          RINGs, milliseconds until the next look, -1 for none}. Of each task {id, KEYID, RING, place, its limits as in
--          the envelope (JSON, cut out of it), fence of its last delivery ('' for none)}. Of each
--          KEYID {KEYID, RING, its score, '1' if more than these of its tasks may start, members that do not wait there
--          any more...}. Of each ring {RING, its score}
-- Without a worker, a token would wait on the stream until it expires, while others could use it.
-- A KEYID that was served least recently comes first, with one task; then each one with its second task, and so on. Of an
-- ordered KEYID, the first task that has not ended may start, or as many as may run side by side.
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local tag = tag_of(KEYS[1])
local most, at = tonumber(ARGV[2]), 5
local unattended = ARGV[3] == '1' and redis.call('EXISTS', KEYS[3]) == 0
local MAX_RINGS, MAX_MEMBERS = 16, 200
local windows = {}
for _ = 1, tonumber(ARGV[4]) do
  windows[ARGV[at]] = tonumber(ARGV[at + 1])
  at = at + 2
end
local rings, scores = {}, {}
local function look_at(ring)
  if not scores[ring] and #rings < MAX_RINGS then
    local score = redis.call('ZSCORE', KEYS[1], ring)
    if score then
      rings[#rings + 1] = {ring, score}
      scores[ring] = score
    end
  end
end
local hinted = {}
for i = at, #ARGV - 1, 2 do
  look_at(ARGV[i + 1])
  hinted[#hinted + 1] = {ARGV[i], ARGV[i + 1]}
end
for _, ring in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, MAX_RINGS)) do
  look_at(ring)
end
local lines, known = {}, {}
local function add(key_id, ring, score, first)
  local name = ring .. ' ' .. key_id
  if score and not known[name] and string.match(key_id, '^o?[%w._,-]+$') then
    known[name] = true
    lines[#lines + 1] = {key_id, ring, score, number = #lines, ring_score = first and 0 or tonumber(score)}
  end
end
for i = 1, #rings do
  local ring = rings[i][1]
  local due = redis.call('ZRANGEBYSCORE', tag .. 'turns:' .. ring, '-inf', now, 'WITHSCORES', 'LIMIT', 0, most + 1)
  for at_due = 1, #due, 2 do
    add(due[at_due], ring, due[at_due + 1], false)
  end
end
for i = 1, #hinted do
  if scores[hinted[i][2]] then
    -- before all others: only these may have room, and no second hint follows
    add(hinted[i][1], hinted[i][2], redis.call('ZSCORE', tag .. 'turns:' .. hinted[i][2], hinted[i][1]), true)
  end
end
table.sort(lines, function(one, other)
  if one.ring_score ~= other.ring_score then
    return one.ring_score < other.ring_score
  end
  return one.number < other.number
end)
for i = #lines, most + 1, -1 do
  lines[i] = nil
end
local share = #lines > 0 and not unattended and math.ceil(most / #lines) or 0
local waiting, longest = {}, 0
for i = 1, #lines do
  local line = lines[i]
  local key_id, ring = line[1], line[2]
  local ordered = string.sub(key_id, 1, 1) == 'o'
  local window = ordered and (windows[ring] or 1)
  local want = ordered and math.min(share, window) or share
  local found, live, looked, left = {}, 0, 0, true
  while left and looked < MAX_MEMBERS and (ordered and live or #found) < want do
    local page = redis.call('ZRANGE', tag .. 'limited:' .. key_id, looked, looked + want, 'WITHSCORES')
    left = #page > 2 * want
    for member = 1, #page, 2 do
      if (ordered and live or #found) == want then
        left = true
        break
      end
      looked = looked + 1
      local task, place = page[member], string.format('%.0f', page[member + 1])
      local of = redis.call('HMGET', tag .. 'record:' .. task, 'state', 'gate', 'env', 'settled')
      local waits = of[1] == 'limited' and of[2] == key_id .. ' ' .. ring .. ' ' .. place
      if ordered and (waits or of[1] == 'queued' or of[1] == 'scheduled') then
        live = live + 1
      elseif not waits then
        line[#line + 1] = task
      end
      if waits then
        found[#found + 1] = {task, key_id, ring, place, string.match(of[3] or '', '"limits":(%[%[.-%]%])') or '[]', of[4] or ''}
      end
    end
  end
  line.left = (unattended or left and not (ordered and live >= window)) and '1' or ''
  waiting[i] = found
  longest = math.max(longest, #found)
end
local tasks = {}
for turn = 1, longest do
  for i = 1, #lines do
    if waiting[i][turn] and #tasks < most then
      tasks[#tasks + 1] = waiting[i][turn]
    end
  end
end
local shown = {}
for i = 1, #lines do
  shown[i] = {lines[i][1], lines[i][2], lines[i][3], lines[i].left, unpack(lines[i], 4)}
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local waited = 0
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[2])
for i = 1, #groups do
  local group = {}
  for field = 1, #groups[i], 2 do
    group[groups[i][field]] = groups[i][field + 1]
  end
  if group['name'] == ARGV[1] then
    local next_message = redis.pcall('XRANGE', KEYS[2], '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
    waited = next_message and math.max(0, math.floor(now - string.match(next_message[1], '^%d+'))) or 0
  end
end
return {string.format('%.0f', now), waited, tasks, shown, rings, first and math.max(0, math.ceil(math.min(tonumber(first) - now, 1e9))) or -1}
