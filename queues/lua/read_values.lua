-- include: inbox, values
-- Read the values of a task that have changed.
-- KEYS  inbox
-- ARGV  number of a change: only later ones are read, name of the only value to read ('' for all), largest size of a value in
--       bytes
-- returns  {number of the last change, then of each value its name, and the value or, if it is too large, its size}
-- Writes nothing. Reads only values that the inbox lists.
local found = {string.format('%.0f', inbox_number(redis.call('HGET', KEYS[1], 'changed')))}
local names = value_names(KEYS[1])
for _, name in ipairs(ARGV[2] == '' and names or {ARGV[2]}) do
  local size = redis.call('HSTRLEN', KEYS[1], 'v:' .. name)
  if size > tonumber(ARGV[3]) then
    found[#found + 1] = name
    found[#found + 1] = size
  elseif size > 0 and value_number(KEYS[1], name) > tonumber(ARGV[1]) then
    found[#found + 1] = name
    found[#found + 1] = redis.call('HGET', KEYS[1], 'v:' .. name)
  end
end
return found
