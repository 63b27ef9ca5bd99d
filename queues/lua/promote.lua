-- include: payload, tag, turns, limited
-- Move due tasks to the ready stream, and tasks that have limits into the waiting lists of these.
-- KEYS  due set, ready stream, then one record per id
-- ARGV  ids, in the order of the records; then, if the messages are for a worker that claims them next: group, consumer of
--       released messages, their idle time in milliseconds
-- returns  the number of tasks that were moved to the stream now
-- Atomic per task: it is in the due set or on the stream, never both, never neither. An id that is no longer due,
-- because another worker promoted it or it was cancelled, is left alone; one that is not scheduled leaves the due set only. The task leaves the due set first: a full
-- server then accepts the rest (see fence.lua), which needs no more memory than before. All scores are read before,
-- because the last task that leaves deletes the due set (see fence.lua). Messages for a worker that claims them are
-- released ones from the start, so that no blocked read of another worker returns them. Where messages wait on the stream,
-- no read blocks, and these are added to them. A task of an ordered KEYID returns to its place in the list, another one goes
-- to the end; one whose cancellation was requested goes to a worker, which needs no tokens to end it. A task that has kept its
-- token while it was parked goes to the stream with it.
-- a key of another type ends the script here, before its first write
redis.call('XRANGE', KEYS[2], '0-0', '0-0')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local moved = 0
local scores, gates = {}, {}
local tag = tag_of(KEYS[1])
for i = 3, #KEYS do
  scores[i] = redis.call('ZSCORE', KEYS[1], ARGV[i - 2])
  local key_id, ring, place = gate_of(KEYS[i], redis.call('HGET', KEYS[i], 'env'))
  if key_id then
    -- a key of another type ends the script here, before its first write
    redis.call('ZSCORE', tag .. 'kept', '')
  end
  if key_id and redis.call('HEXISTS', tag .. 'control:' .. ARGV[i - 2], 'cancel') == 0 and sound_line(tag, key_id, ring) then
    gates[i] = {key_id, ring, string.sub(key_id, 1, 1) == 'o' and place or 0}
  end
end
local group, keep = ARGV[#KEYS - 1], false
local groups = group and redis.pcall('XINFO', 'GROUPS', KEYS[2]) or {}
for i = 1, #groups do
  local found = {}
  for at = 1, #groups[i], 2 do
    found[groups[i][at]] = groups[i][at + 1]
  end
  if found['name'] == group then
    keep = #redis.call('XRANGE', KEYS[2], '(' .. found['last-delivered-id'], '+', 'COUNT', 1) == 0
  end
end
for i = 3, #KEYS do
  if scores[i] and tonumber(scores[i]) <= now then
    redis.call('ZREM', KEYS[1], ARGV[i - 2])
    local envelope, arguments = payload(KEYS[i], ARGV[i - 2])
    local gate, of = gates[i], redis.call('HMGET', KEYS[i], 'state', 'keeps')
    -- also of a task that was stored without its limits
    local keeps = of[2]
    local token = keeps and {'token', string.match(keeps, '^%S*')} or {}
    if envelope and gate and not keeps and of[1] == 'scheduled' then
      redis.call('HSET', KEYS[i], 'state', 'limited')
      redis.call('HDEL', KEYS[i], 'due', 'waits', 'wakes', 'returned')
      wait_in_line(tag, KEYS[i], ARGV[i - 2], gate[1], gate[2], gate[3], now * 1000, now)
    elseif envelope and of[1] == 'scheduled' then
      local entry = redis.call('XADD', KEYS[2], '*', 'env', envelope, 'args', arguments, 'again', '1', unpack(token))
      redis.call('HSET', KEYS[i], 'state', 'queued', 'entry', entry)
      redis.call('HDEL', KEYS[i], 'due', 'waits', 'wakes', 'returned')
      if keeps then
        redis.call('HDEL', KEYS[i], 'keeps')
        redis.pcall('ZREM', tag .. 'kept', ARGV[i - 2])
      end
      moved = moved + 1
    end
  end
end
if keep and moved > 0 then
  local read = redis.call('XREADGROUP', 'GROUP', group, ARGV[#KEYS], 'COUNT', moved, 'STREAMS', KEYS[2], '>')
  for _, message in ipairs(read[1][2]) do
    redis.call('XCLAIM', KEYS[2], group, ARGV[#KEYS], 0, message[1], 'IDLE', ARGV[#KEYS + 1], 'RETRYCOUNT', 0, 'JUSTID')
  end
end
return moved
