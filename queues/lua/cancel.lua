-- include: retention, watched, streams, tag, turns
-- Cancel a task from outside: at once if no worker runs it, else by a request that its worker sees. One that has a clean-up
-- task becomes due with such a request: the worker that takes it ends it, and enqueues the clean-up task in one act.
-- KEYS  ready stream, record, steps, log, due set, retentions, inbox, control, timeline, nudge stream, outbox, tasks that
--       wait for a version, or that pauses hold
-- ARGV  group, first character of the consumers that are not workers, task id, retention in milliseconds, the same
--       rounded up to one that is registered, then what the caller has read of the record: at, entry, token, replays;
--       channel of a worker, without its id; what the task waits for, as the caller has read it; id of the task of its
--       unique key or limit that replaces it, '' for none; '1' to leave a task alone that a worker has started; the
--       limit that has no room for it, '' for none: then one that has been admitted is left alone; for a job: the only states
--       in which it is cancelled, as `queued,waiting`, '' for any, and the latest time of enqueueing in ms, '' for any. The
--       caller names the last key only if it is parked there
-- returns  'missing', 'requested', 'deferred' (a worker cancels it), 'cancelled', the terminal state that the task has
--          already, 'started' (left alone), 'other' (it has another state, or was enqueued later), or 'changed':
--          the record is not that of the task that the caller has read
-- Atomic: reads and acts in one script, so that no worker can take the task in between; so the state that a job asks for
-- is that of the moment of the act, whatever its caller has read before. Before the first worker comes,
-- there is no group: XPENDING answers with an error, and no worker has the message. The first write changes
-- nothing, and after it a full server accepts the rest (see fence.lua). A command that arrives late does not cancel a
-- task that was replayed, or enqueued again under the same id, since. The notification of the worker is a hint: if it is
-- lost or refused (hence pcall), the worker sees the request when it next renews the lease. A task has a clean-up task if
-- its envelope says so, or if a run of it has (`s:#on_end` in the checkpoint): only a worker can encrypt that. One that has
-- children is deferred as well: the worker that ends it cancels them. A token of limits that it has kept while it was parked is
-- released by the worker that promotes the partition, now.
local state = redis.call('HGET', KEYS[2], 'state')
if not state then
  return 'missing'
end
if state ~= 'queued' and state ~= 'scheduled' and state ~= 'limited' then
  return state
end
local now = redis.call('HMGET', KEYS[2], 'at', 'entry', 'token', 'replays', 'waits')
local function born(at, entry)
  return at or string.match(entry or '', '^%d+') or ''
end
if born(now[1], now[2]) ~= born(ARGV[6] ~= '' and ARGV[6], ARGV[7])
  or (now[3] or '') ~= ARGV[8] or (now[4] or '') ~= ARGV[9] or (now[5] or '') ~= ARGV[11] then
  return 'changed'
end
local unstarted = ARGV[13] == '1'
if ARGV[14] ~= '' and state ~= 'limited' then
  return 'started'
end
if unstarted then
  local of_runs = redis.call('HMGET', KEYS[2], 'returned', 'attempts', 'crashes', 'replays', 'worker', 'settled', 'wakes')
  -- a worker may have put it there before its handler ran, for its limits or for a pause: then nothing is recorded
  local held = state == 'limited' or string.sub(of_runs[7] or '', 1, 6) == 'pause:'
  for i = 1, held and 4 or 6 do
    if of_runs[i] and of_runs[i] ~= '0' then
      return 'started'
    end
  end
  if held and redis.call('EXISTS', KEYS[3]) == 1 then
    return 'started'
  end
end
local cleanup = redis.call('HEXISTS', KEYS[3], 's:#on_end') == 1
if not cleanup then
  local envelope = redis.call('HGET', KEYS[2], 'env')
  local read, form = pcall(cjson.decode, envelope or '')
  cleanup = read and type(form) == 'table' and form.on_end == true
end
cleanup = cleanup or redis.call('HEXISTS', KEYS[2], 'joins') == 1
local pending = {}
if state == 'queued' then
  local entry = redis.call('HGET', KEYS[2], 'entry')
  pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)[1] or {}
  if unstarted and (pending[4] or 0) > 0 then
    return 'started'
  end
end
if ARGV[15] ~= '' then
  local shown = state == 'scheduled' and now[5] and 'waiting' or state
  if pending[2] and string.sub(pending[2], 1, 1) ~= ARGV[2] then
    shown = 'running'
  end
  if not string.find(',' .. ARGV[15] .. ',', ',' .. shown .. ',', 1, true) then
    return 'other'
  end
end
if ARGV[16] ~= '' and (tonumber(born(now[1], now[2])) or 0) > tonumber(ARGV[16]) then
  return 'other'
end
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[6], '')
redis.call('ZSCORE', KEYS[11], '')
local streams = stream_keys(KEYS[2])
local tag, key_id, ring = line_of(KEYS[2], redis.call('HGET', KEYS[2], 'gate'), true)
redis.call('PERSIST', KEYS[8])
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[2], 'replaced_by', ARGV[12])
end
if ARGV[14] ~= '' then
  redis.call('HSET', KEYS[2], 'dropped', ARGV[14])
end
if state ~= 'queued' then
  redis.call('ZREM', KEYS[5], ARGV[3])
  if KEYS[12] then
    redis.call('ZREM', KEYS[12], ARGV[3])
  end
else
  local entry = redis.call('HGET', KEYS[2], 'entry')
  if pending[2] and string.sub(pending[2], 1, 1) ~= ARGV[2] then
    redis.call('HSET', KEYS[8], 'cancel', '1')
    redis.pcall('PUBLISH', ARGV[10] .. pending[2], ARGV[3])
    return 'requested'
  end
  redis.call('XACK', KEYS[1], ARGV[1], entry)
  redis.call('XDEL', KEYS[1], entry)
  redis.call('HSETNX', KEYS[2], 'at', string.match(entry, '^%d+'))
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if tag then
  leave_line(tag, ARGV[3], key_id, ring, now)
end
if redis.call('HEXISTS', KEYS[2], 'keeps') == 1 then
  local tag = tag_of(KEYS[2])
  redis.pcall('ZADD', tag .. 'kept', 'XX', now, ARGV[3])
end
if cleanup then
  redis.call('HSET', KEYS[8], 'cancel', '1')
  redis.call('HSET', KEYS[2], 'state', 'scheduled', 'due', now)
  redis.call('HDEL', KEYS[2], 'entry', 'waits', 'wakes')
  redis.call('ZADD', KEYS[5], now, ARGV[3])
  redis.call('XADD', KEYS[10], 'MAXLEN', 16, '*', 'why', 'due')
  return 'deferred'
end
redis.call('DEL', KEYS[8])
redis.call('HSET', KEYS[2], 'state', 'cancelled', 'finished', now)
redis.call('HDEL', KEYS[2], 'entry', 'due', 'waits', 'wakes')
register_retention(KEYS[6], ARGV[5], now)
if is_watched(KEYS[2]) then
  redis.call('HSET', KEYS[2], 'kept', ARGV[4] .. ' ' .. ARGV[5])
  put_notice(KEYS[11], ARGV[3], now)
else
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('PEXPIRE', KEYS[4], ARGV[4])
redis.call('PEXPIRE', KEYS[7], ARGV[4])
expire_streams(streams, ARGV[4])
redis.call('PEXPIRE', KEYS[9], 2592000000)
redis.call('PUBLISH', KEYS[2], 'cancelled')
return 'cancelled'
