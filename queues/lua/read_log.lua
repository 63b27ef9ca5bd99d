-- include: bounded
-- Read a page of the events of a log.
-- KEYS  log
-- ARGV  XRANGE or XREVRANGE, first and last id as for that, largest number of events, of their bytes
-- returns  {entries, whether more may follow: 1 or 0}
-- Writes nothing. A page has at least one entry; one that is over the limit of bytes alone has type, number and `bytes`, its
-- size, in place of its fields.
local found, page, left = {}, {}, tonumber(ARGV[5])
if ARGV[1] == 'XRANGE' then
  found = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])
else
  found = redis.call('XREVRANGE', KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])
end
for _, entry in ipairs(found) do
  local size = entry_size(entry)
  if size > tonumber(ARGV[5]) then
    cut_entry(entry, size)
  elseif size > left then
    return {page, 1}
  else
    left = left - size
  end
  page[#page + 1] = entry
end
return {page, #page == tonumber(ARGV[4]) and 1 or 0}
