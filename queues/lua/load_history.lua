-- include: bounded, inbox
-- Read what earlier runs of a task left, and what others sent to it.
-- KEYS  record, inbox, control, steps, log
-- ARGV  pattern of the fields of the checkpoint, number of them in a page, number of the latest events, limits in bytes: of the
--       fields of the record, of the page, of an event; then names of fields of the record
-- returns  {fields of the record, number of the last message, whether cancellation was requested, cursor and page of the
--          checkpoint, latest events, newest first, time, why the checkpoint cannot be read}; what does not fit is
--          replaced, see bounded.lua
-- Writes nothing.
local page = redis.pcall('HSCAN', KEYS[4], 0, 'MATCH', ARGV[1], 'COUNT', ARGV[2])
local problem = page.err or false
if problem then
  page = {'0', {}}
end
bound_values(page[2], 2, 2, tonumber(ARGV[5]))
local fields = redis.call('HMGET', KEYS[1], unpack(ARGV, 7))
local latest = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', ARGV[3])
for _, entry in ipairs(latest) do
  local size = entry_size(entry)
  if size > tonumber(ARGV[6]) then
    cut_entry(entry, size)
  end
end
return {
  bound_values(fields, 1, 1, tonumber(ARGV[4])),
  inbox_number(redis.call('HGET', KEYS[2], 'last')),
  redis.call('HEXISTS', KEYS[3], 'cancel'),
  page,
  latest,
  redis.call('TIME'),
  problem,
}
