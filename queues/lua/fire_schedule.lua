-- Store the task of a planned time of a schedule, once.
-- KEYS  due set, nudge stream, closed mark, timeline, record, epoch and last planned time that was fired here
-- ARGV  id, envelope, arguments, planned time in ms, delay in ms, milliseconds for which the last planned time is kept; end
--       of the claim of a unique key in ms of Redis' clock, '' without one; request to cancel the task of this partition
--       that this one replaces, '' for none; epoch of the schedule
-- returns  1 stored now; 0 this time or a later one was fired here already, or the id is known; -1 the partition is closed;
--          -2 the claim has ended
-- Atomic: record, due time, entry in the timeline and the last planned time appear together. Planned times of a schedule are
-- fired in their order, so that bytes that arrive late store nothing, also when the record of the task has expired.
-- A higher epoch begins its planned times from the start: an operator asked for it after the clock was set back.
-- The due set takes every kind of task: those with limits go from there into their waiting lists (promote.lua). A closed
-- partition takes none any more, so that the next one may be tried: see schedules/firing.py.
-- a key of another type ends the script here, before its first write
redis.call('ZSCORE', KEYS[1], '')
redis.call('XRANGE', KEYS[2], '0-0', '0-0')
redis.call('ZSCORE', KEYS[4], '')
local epoch, fired = string.match(redis.call('GET', KEYS[6]) or '', '^(%d+) (%d+)$')
epoch, fired = tonumber(epoch or 0), tonumber(fired or 0)
local before = epoch > tonumber(ARGV[9]) or (epoch == tonumber(ARGV[9]) and fired >= tonumber(ARGV[4]))
if before or redis.call('EXISTS', KEYS[5]) == 1 then
  return 0
elseif redis.call('EXISTS', KEYS[3]) == 1 then
  return -1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[7] ~= '' and now >= tonumber(ARGV[7]) then
  return -2
end
local due = now + tonumber(ARGV[5])
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
redis.call('ZADD', KEYS[1], due, ARGV[1])
redis.call('HSET', KEYS[5], 'state', 'scheduled', 'at', now, 'due', due, 'env', ARGV[2], 'args', ARGV[3])
redis.call('ZADD', KEYS[4], now, ARGV[1])
redis.call('SET', KEYS[6], ARGV[9] .. ' ' .. ARGV[4], 'PX', ARGV[6])
if ARGV[8] ~= '' then
  redis.call('ZADD', KEYS[1], 0, ARGV[8])
end
if ARGV[8] ~= '' or not first[2] or due < tonumber(first[2]) then
  redis.call('XADD', KEYS[2], 'MAXLEN', 16, '*', 'why', 'due')
end
return 1
